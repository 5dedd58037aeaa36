#include "kernels.h"
#define WHERRY_NEON 1
#include "vec_generic.h"

#include "passes_impl.h"
#include "update_impl.h"

extern const Kernels kernels_neon = {update, cast, accumulate, sum_squares,
                                     split,  join, quantize,        dequantize, limit};
