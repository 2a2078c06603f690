// Functions that other source files call.
#pragma once

#include <cstdint>

#include "platform.h"

EXPORT int swarm_matmul(const float *x, long rows, long in, int count, const uint8_t *const *packed, const float *const *scales,
                 float *const *ys, const long *outs, int isa, int threads);
EXPORT int swarm_matmul4(const float *x, long rows, long in, int count, const uint8_t *const *packed, float *const *ys,
                         const long *outs, int isa, int threads);
EXPORT int swarm_store(const void *parts, const int64_t *firsts, long count, const int64_t *key_channels,
                const int64_t *value_channels, const float *keys, long key_row, long key_head, const float *values,
                long value_row, long value_head, long heads, long width, long value_width);
EXPORT int swarm_attend(const void *parts, const int64_t *firsts, long count, const int64_t *key_channels,
                 const int64_t *value_channels, const float *query, long query_row, long query_head, long heads, long width,
                 long value_width, float scale, float *out, int isa, int threads);
