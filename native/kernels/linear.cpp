// The table of linear kernels of one instruction set.
#include "kernels/dequantize.h"
#include "kernels/encode_row.h"
#include "kernels/gemm_float.h"
#include "kernels/gemm_int.h"
#include "kernels/gemm_row.h"
#include "kernels/pack.h"
#include "kernels/quantize.h"

namespace invar::INVAR_ISA {

static void gemm(WeightFormat format, const uint8_t* panel, int64_t k, const uint8_t* act,
                 int64_t act_stride, int rows, float* out, int64_t out_stride) {
  switch (format) {
#define INVAR_FLOAT(name, Step) \
  case WeightFormat::name:      \
    return gemm_float<Step>(panel, k, act, act_stride, rows, out, out_stride);
#define INVAR_INT(name, Suffix)                                                                  \
  case WeightFormat::name:                                                                       \
    return gemm_int<Format##Suffix>(act_format_of(format), panel, k, act, act_stride, rows, out, \
                                    out_stride);
    INVAR_FLOAT(f32, StepF32)
    INVAR_FLOAT(f16, StepF16)
    INVAR_FLOAT(bf16, StepBf16)
    INVAR_RECORD_FORMATS(INVAR_INT)
#undef INVAR_FLOAT
#undef INVAR_INT
    case WeightFormat::int8:
      return gemm_int8(panel, k, act, act_stride, rows, out, out_stride);
    case WeightFormat::nvfp4:
      return gemm_nvfp4(panel, k, act, act_stride, rows, out, out_stride);
    case WeightFormat::fp8:
      return gemm_fp8(panel, k, act, act_stride, rows, out, out_stride);
    case WeightFormat::count:
      break;
  }
}

extern const LinearKernels linear_kernels = {pack, dequantize_row, encode_row, quantize_columns,
                                             gemm};

}  // namespace invar::INVAR_ISA
