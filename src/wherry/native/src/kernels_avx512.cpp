#include "kernels.h"
#include "vec_avx512.h"

#include "passes_impl.h"
#include "update_impl.h"

extern const Kernels kernels_avx512 = {update, cast, accumulate, sum_squares,
                                     split,  join, quantize,        dequantize, limit};
