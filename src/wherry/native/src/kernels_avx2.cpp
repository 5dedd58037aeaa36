#include "kernels.h"
#include "vec_avx2.h"

#include "passes_impl.h"
#include "update_impl.h"

extern const Kernels kernels_avx2 = {update, cast, accumulate, sum_squares,
                                     split,  join, quantize,        dequantize, limit};
