// The ops. Each has a Params struct, a CPU implementation chosen at run time by instruction set,
// and a double-precision oracle in tests/cpp/oracle. Counts are exact, ranges are half open,
// strides are elements, empty inputs are ordinary and do nothing. Arithmetic is float32 whatever
// the storage.
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
#include "phasekv/ops/select_top.h"
#include "phasekv/ops/triattention_score.h"
