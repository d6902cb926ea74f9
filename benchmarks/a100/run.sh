#!/usr/bin/env bash
# Everything that needs a CUDA device, in one command: builds for it, runs the tests of the kernels
# and of their bindings on it, and the benchmark of the kernels; then smaller tests under
# compute-sanitizer, and with a model vLLM's prefill and throughput with PhaseKV and without.
#
#   benchmarks/a100/run.sh [OUTPUT FOLDER [MODEL FOLDER]]
#
# It begins with what the machine lacks. A step that needs it is skipped, one that fails does not
# stop the others, and the exit status is 0 only if none failed. The output folder gets result.json,
# renewed after each step, log.txt and plots.
#
#   PYTHON            whose torch sees the device (default: .venv/bin/python, else python3)
#   STEPS             what to run of: build tests package bindings kernels memcheck racecheck
#                     synccheck prefill throughput (default: all); earlier builds are used again
#   SECONDS_PER_STEP  that each may take (default: 1800)
#
# GoogleTest is the system's, or its source in build/googletest, which Debian's libgtest-dev has in
# /usr/src/googletest; only without either it is downloaded.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
output=$(realpath -m "${1:-build/a100}")
model=${2:+$(realpath -m "$2")}
steps=${STEPS:-build tests package bindings kernels memcheck racecheck synccheck prefill throughput}
build=build/cuda
site=$PWD/$build/site
googletest=$PWD/build/googletest
tests=$build/tests/cuda_device/phasekv_cuda_device_tests
parts=$build/measured # what the steps say, for collect.py
log=$output/log.txt
export PATH=$PWD/.venv/bin:$PATH:/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer
python=${PYTHON:-$(command -v .venv/bin/python || command -v python3)}
# Of every op, none with large problems: each tool makes a kernel ten to a thousand times slower.
sanitized=(
  '*.EveryCase/*' '*AttendRows.EveryLayoutAndType/*' '*AttendRows.MixedBatches/*'
  '*CudaEvictor.SmallRequests/*' '*GatherScatter.*' '*SelectTop.*'
)
failures=0
# A whole run does not keep what an earlier one has measured.
[[ -n ${STEPS:-} ]] || rm -rf "$parts" "$output"/{result.json,kernels.png,prefill.png,throughput.png}
mkdir -p "$output" "$parts"
: >"$log"
: >"$parts/steps.jsonl"

# ---- What a step is.

wanted() { [[ " $steps " == *" $1 "* ]]; }

collect() { "$python" benchmarks/a100/collect.py "$parts" "$output"; }

# step NAME COMMAND...: runs it, and shows the end of what it says.
step() {
  local name=$1 begin=$SECONDS status=0 lines shown=4
  shift
  printf '==> %s: %s\n' "$name" "$*" >>"$log"
  lines=$(wc -l <"$log")
  timeout --kill-after=10 "${SECONDS_PER_STEP:-1800}" "$@" >>"$log" 2>&1 || status=$?
  if [[ $status != 0 ]]; then
    shown=40
    failures=$((failures + 1))
  fi
  printf '==> %s: %d s, exit status %d\n' "$name" "$((SECONDS - begin))" "$status"
  tail -n +$((lines + 1)) "$log" | tail -n "$shown"
  printf '{"step": "%s", "exit_status": %d, "seconds": %d}\n' \
    "$name" "$status" "$((SECONDS - begin))" >>"$parts/steps.jsonl"
  collect
  return "$status"
}

skip() {
  wanted "$1" || return
  echo "==> $1: skipped, $2"
  printf '{"step": "%s", "skipped": "%s"}\n' "$1" "$2" >>"$parts/steps.jsonl"
}

# ---- What the machine lacks.

lacking() {
  if ! command -v "$python" >/dev/null; then
    echo "python ($python)"
    return
  fi
  local version
  version=$(cmake --version 2>/dev/null | awk 'NR == 1 { print $3 }')
  printf '3.26\n%s\n' "$version" | sort -CV || echo "cmake 3.26 or newer, not ${version:-none}"
  command -v ninja >/dev/null || echo ninja
  ${CXX:-c++} -std=c++20 -fsyntax-only -x c++ /dev/null 2>/dev/null || echo "a C++20 compiler"
  command -v "${CUDACXX:-nvcc}" >/dev/null || echo nvcc
  [[ -d $googletest ]] || ${CXX:-c++} -fsyntax-only -x c++ -include gtest/gtest.h /dev/null 2>/dev/null ||
    timeout 5 bash -c ': </dev/tcp/github.com/443' 2>/dev/null || echo "GoogleTest in $googletest"
}

# Of the Python module and what uses it.
lacking_of_python() {
  "$python" - torch numpy pybind11 scikit_build_core pip <<'PYTHON'
import importlib.util, pathlib, sys, sysconfig

for name in sys.argv[1:]:
    if importlib.util.find_spec(name) is None:
        print(name)
if not pathlib.Path(sysconfig.get_paths()["include"], "Python.h").exists():
    print("Python.h")
PYTHON
}

if ! nvidia-smi >>"$log" 2>&1; then
  echo "no CUDA device: nvidia-smi failed, see $log" >&2
  exit 1
fi
missing=$(lacking)
if [[ -n $missing ]]; then
  echo "missing: ${missing//$'\n'/, }" >&2
  exit 1
fi
missing_of_python=$(lacking_of_python)
missing_of_python=${missing_of_python//$'\n'/, }
[[ -z $missing_of_python ]] || echo "missing for $python: $missing_of_python"

# ---- The kernels.

# For this device alone, where the compiler knows it.
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -cd '0-9')
settings=(-DCMAKE_BUILD_TYPE=Release -DPHASEKV_TESTS=ON -DPHASEKV_CUDA=ON)
if "${CUDACXX:-nvcc}" --list-gpu-code 2>/dev/null | grep -qx "sm_$capability"; then
  settings+=("-DCMAKE_CUDA_ARCHITECTURES=$capability-real")
fi
targets=(phasekv_cuda_device_tests)
if [[ -z $missing_of_python ]]; then
  settings+=(-DPHASEKV_PYTHON=ON)
  settings+=("-DPython_EXECUTABLE=$("$python" -c 'import sys; print(sys.executable)')")
  targets+=(_core)
fi
[[ ! -d $googletest ]] || settings+=("-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST=$googletest")
if wanted build; then
  # The tests shall be built also where the module cannot be.
  step configure cmake -S . -B "$build" -G Ninja "${settings[@]}" &&
    step build cmake --build "$build" --target "${targets[@]}" -- -k 0
fi

# device_tests STEP COMMAND...: their result is the step's.
device_tests() {
  local name=$1
  shift
  step "$name" "$python" benchmarks/a100/device_tests.py --json "$parts/$name.json" "$@"
}
# Several suites at a time, where the device takes several processes.
jobs=4
[[ $(nvidia-smi --query-gpu=compute_mode --format=csv,noheader | head -n 1) == Default ]] || jobs=1
if [[ ! -x $tests ]]; then
  for name in tests memcheck racecheck synccheck; do skip "$name" "there is no $tests"; done
else
  ! wanted tests || device_tests tests --jobs "$jobs" --seconds 120 -- "$tests"
fi

# ---- The Python module, in the package as vLLM finds plugins.

if [[ -n $missing_of_python ]]; then
  for name in package bindings kernels prefill throughput; do
    skip "$name" "missing: $missing_of_python"
  done
elif wanted package; then
  rm -rf "$site"
  step package "$python" -m pip install --quiet --no-deps --no-build-isolation --no-index \
    --target "$site" -C build-dir="$build" -C build.targets=_core \
    -C cmake.define.PHASEKV_CUDA=ON -C cmake.define.PHASEKV_TESTS=ON .
fi
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
sees_device() { "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; }
can_measure=
if [[ -n $missing_of_python ]]; then
  :
elif [[ ! -d $site ]]; then
  for name in bindings kernels prefill throughput; do skip "$name" "there is no package"; done
elif ! sees_device 2>>"$log"; then
  for name in bindings kernels prefill throughput; do
    skip "$name" "torch of $python sees no CUDA device"
  done
  failures=$((failures + 1))
else
  can_measure=yes
  ! wanted bindings || step bindings env PYTHONPATH="$PYTHONPATH:tests/cuda_emulation/python" \
    "$python" -m pytest -q -c /dev/null --rootdir . -p no:cacheprovider tests/cuda_device/python
  ! wanted kernels || step kernels "$python" benchmarks/cuda/kernel_speed.py --json "$parts/kernels.json"
fi

for tool in memcheck racecheck synccheck; do
  wanted "$tool" && [[ -x $tests ]] || continue
  if command -v compute-sanitizer >/dev/null; then
    device_tests "$tool" --tests "${sanitized[@]}" --jobs "$jobs" --seconds 120 -- \
      compute-sanitizer --tool "$tool" --error-exitcode 1 "$tests"
  else
    skip "$tool" "compute-sanitizer is not on PATH"
  fi
done

# ---- vLLM.

if [[ -z $can_measure ]]; then
  :
elif [[ -z $model ]]; then
  skip prefill "no model folder was given"
  skip throughput "no model folder was given"
elif [[ ! -f $model/config.json ]]; then
  skip prefill "$model has no config.json"
  skip throughput "$model has no config.json"
elif ! "$python" -c 'import vllm' 2>>"$log"; then
  skip prefill "$python has no vllm"
  skip throughput "$python has no vllm"
else
  # Layers, and the lengths of prompts that the model has positions for.
  read -ra numbers < <("$python" -c '
import json, sys
config = json.load(open(sys.argv[1]))
longest = config["max_position_embeddings"] - 64
print(config["num_hidden_layers"], *(n for n in (2048, 4096, 8192, 16384) if n <= longest))
' "$model/config.json")
  # Plain vLLM and PhaseKV share the device.
  ! wanted prefill || step prefill "$python" benchmarks/prefill.py --model "$model" \
    --dtype bfloat16 --tokens "${numbers[@]:1}" --engines '{"gpu_memory_utilization": 0.4}' \
    --json "$parts/prefill.json"
  ! wanted throughput || step throughput env VLLM_USE_V2_MODEL_RUNNER=0 "$python" \
    benchmarks/throughput.py --model "$model" --layers "${numbers[0]}" --dtype bfloat16 \
    --policies agentkv phase_balanced --json "$parts/throughput.json"
fi
for name in prefill throughput; do
  [[ ! -f $parts/$name.json ]] ||
    "$python" "benchmarks/plots/$name.py" "$parts/$name.json" "$output/$name.png" >>"$log" 2>&1 ||
    echo "==> no plot of $name, see $log"
done
collect
echo "==> $output/result.json; steps that failed: $failures"
((failures == 0))
