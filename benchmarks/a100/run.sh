#!/usr/bin/env bash
# Everything that needs a CUDA device, in one command: builds for it, runs the tests of the kernels on
# it, the same under compute-sanitizer, and the benchmark of the kernels; with a model also vLLM's
# prefill and throughput with PhaseKV and without; one JSON of all of it, and plots.
#
#   benchmarks/a100/run.sh [OUTPUT FOLDER [MODEL FOLDER]]
#
# A step whose tool is missing is skipped, which the JSON says; one that fails does not stop the
# others. PYTHON names a Python whose torch sees the device (default: .venv/bin/python).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
output=$(realpath -m "${1:-build/a100}")
model=${2:+$(realpath "$2")}
build=build/cuda
python=${PYTHON:-.venv/bin/python}
tests=$build/tests/cuda_device/phasekv_cuda_device_tests
# Small problems: each tool makes a kernel ten to a thousand times slower.
sanitized='*GatherBlocks*:*ApplyShift*:*MixedBatches/device*:*SelectTop*'
mkdir -p "$output"
: >"$output/steps.jsonl"

# step NAME COMMAND...: runs it, with its output in NAME.log; says how it ended.
step() {
  local name=$1 begin=$SECONDS status=0
  shift
  echo "==> $name"
  "$@" >"$output/$name.log" 2>&1 || status=$?
  tail -n 3 "$output/$name.log"
  printf '{"step": "%s", "exit_status": %d, "seconds": %d}\n' \
    "$name" "$status" "$((SECONDS - begin))" >>"$output/steps.jsonl"
  return "$status"
}

skip() {
  echo "==> $1: skipped, $2"
  printf '{"step": "%s", "skipped": "%s"}\n' "$1" "$2" >>"$output/steps.jsonl"
}

build_for_the_device() {
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DPHASEKV_TESTS=ON -DPHASEKV_CUDA=ON \
    -DPHASEKV_PYTHON=ON -DPython_EXECUTABLE="$(command -v "$python")" &&
    cmake --build "$build" --target phasekv_cuda_device_tests _core
}

if ! nvidia-smi >"$output/nvidia-smi.log" 2>&1; then
  echo "no CUDA device: nvidia-smi failed, see $output/nvidia-smi.log" >&2
  exit 1
fi
step build build_for_the_device || exit 1
step tests ctest --test-dir "$build" -L gpu --output-on-failure
for tool in memcheck racecheck synccheck; do
  if command -v compute-sanitizer >/dev/null; then
    step "$tool" compute-sanitizer --tool "$tool" --error-exitcode 1 "$tests" \
      --gtest_filter="$sanitized"
  else
    skip "$tool" "compute-sanitizer is not on PATH"
  fi
done
# The package of this tree with the module that was built for the device, as vLLM finds plugins.
site=$output/site
rm -rf "$site"
step package "$python" -m pip install --quiet --no-deps --no-build-isolation --no-index \
  --target "$site" -C build-dir="$build" -C build.targets=_core \
  -C cmake.define.PHASEKV_CUDA=ON -C cmake.define.PHASEKV_TESTS=ON . || exit 1
export PYTHONPATH="$site"
sees_device() { "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; }
if sees_device 2>/dev/null; then
  step kernels "$python" benchmarks/cuda/kernel_speed.py --json "$output/kernels.json"
else
  skip kernels "torch of $python sees no CUDA device"
fi
if [[ -z $model ]]; then
  skip prefill "no model folder was given"
  skip throughput "no model folder was given"
elif ! "$python" -c 'import vllm' 2>/dev/null; then
  skip prefill "$python has no vllm"
  skip throughput "$python has no vllm"
else
  layers=$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["num_hidden_layers"])' \
    "$model/config.json")
  # Plain vLLM and PhaseKV share the device.
  step prefill "$python" benchmarks/prefill.py --model "$model" --dtype bfloat16 \
    --tokens 2048 4096 8192 16384 --engines '{"gpu_memory_utilization": 0.4}' \
    --json "$output/prefill.json" &&
    "$python" benchmarks/plots/prefill.py "$output/prefill.json" "$output/prefill.png"
  step throughput env VLLM_USE_V2_MODEL_RUNNER=0 "$python" benchmarks/throughput.py \
    --model "$model" --layers "$layers" --dtype bfloat16 --policies agentkv phase_balanced \
    --json "$output/throughput.json" &&
    "$python" benchmarks/plots/throughput.py "$output/throughput.json" "$output/throughput.png"
fi
"$python" benchmarks/a100/collect.py "$output"
