// The kernels of the instruction set that is being compiled.
#pragma once

#include "cpu/isa.h"
#include "cpu/kernel_table.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

void gather_blocks(const GatherBlocksParams& params);
void scatter_blocks(const ScatterBlocksParams& params);
void rotate_keys(const RotateKeysParams& params);
void divergence(const DivergenceParams& params);
void mean_residual(const MeanResidualParams& params);
void apply_shift(const ApplyShiftParams& params);
void attend_rows(const AttendRowsParams& params);
void push_queries(const PushQueriesParams& params);
void score_keys(const ScoreKeysParams& params);
void accumulate_attention(const AccumulateAttentionParams& params);
void compact(const CompactParams& params);
void key_redundancy(const KeyRedundancyParams& params);
void keydiff_score(const KeydiffScoreParams& params);
void expected_attention_score(const ExpectedAttentionScoreParams& params);
void triattention_score(const TriattentionScoreParams& params);
void quantize(const QuantizeParams& params);
void dequantize(const DequantizeParams& params);

// Names all of the above; what src/dispatch.cpp chooses between.
const KernelTable& kernel_table();

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
