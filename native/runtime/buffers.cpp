#include "runtime/buffers.h"

namespace invar {

int64_t act_block(ActFormat format) {
  switch (format) {
    case ActFormat::q8_32:
      return 32;
    case ActFormat::q8_256:
      return 256;
    case ActFormat::q8_16:
      return 16;
    case ActFormat::bf16:
      return 2;
    case ActFormat::f32:
    case ActFormat::q8_row:  // of any length; never in parts
      break;
  }
  return 1;
}

}  // namespace invar
