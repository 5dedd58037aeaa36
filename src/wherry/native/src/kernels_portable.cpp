#include "kernels.h"
#include "vec_generic.h"

#include "passes_impl.h"
#include "update_impl.h"

extern const Kernels kernels_portable = {update, cast, accumulate, sum_squares,
                                     split,  join, quantize,        dequantize, limit};
