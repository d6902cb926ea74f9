// The CPU kernels of one instruction set. Arguments have been validated (src/validate.h).
#pragma once

#include "phasekv/ops/accumulate_attention.h"
#include "phasekv/ops/apply_shift.h"
#include "phasekv/ops/attend_rows.h"
#include "phasekv/ops/compact.h"
#include "phasekv/ops/divergence.h"
#include "phasekv/ops/expected_attention_score.h"
#include "phasekv/ops/gather_scatter.h"
#include "phasekv/ops/key_redundancy.h"
#include "phasekv/ops/keydiff_score.h"
#include "phasekv/ops/mean_residual.h"
#include "phasekv/ops/push_queries.h"
#include "phasekv/ops/quantize.h"
#include "phasekv/ops/rotate_keys.h"
#include "phasekv/ops/score_keys.h"
#include "phasekv/ops/triattention_score.h"

namespace phasekv::cpu {

struct KernelTable {
  void (*gather_blocks)(const GatherBlocksParams&);
  void (*scatter_blocks)(const ScatterBlocksParams&);
  void (*rotate_keys)(const RotateKeysParams&);
  void (*divergence)(const DivergenceParams&);
  void (*mean_residual)(const MeanResidualParams&);
  void (*apply_shift)(const ApplyShiftParams&);
  void (*attend_rows)(const AttendRowsParams&);
  void (*push_queries)(const PushQueriesParams&);
  void (*score_keys)(const ScoreKeysParams&);
  void (*accumulate_attention)(const AccumulateAttentionParams&);
  void (*compact)(const CompactParams&);
  void (*key_redundancy)(const KeyRedundancyParams&);
  void (*keydiff_score)(const KeydiffScoreParams&);
  void (*expected_attention_score)(const ExpectedAttentionScoreParams&);
  void (*triattention_score)(const TriattentionScoreParams&);
  void (*quantize)(const QuantizeParams&);
  void (*dequantize)(const DequantizeParams&);
};

}  // namespace phasekv::cpu
