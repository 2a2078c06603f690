// Attention of some query heads to the positions of one row, for one instruction set: attention.cpp includes this file once
// for each, inside a namespace in which the compiler may use that set and which has defined, for vectors of LANES floats:
//   Vec                                 the vector
//   SUMS                                vectors of sums in registers at a time
//   fill(x), load(p), store(p, v)       p: of any alignment
//   in_register(v)                      v, kept in a register: the compiler must not reload it
//   load_some(p, n)                     n < LANES floats, then zeros; reads only these n
//   add, sub, mul(a, b), fma(a, b, c)   fma: a * b + c
//   max(a, b)                           b where either is NaN
//   power_of_two(v)                     2**n, of n + 1.5 * 2**23 in every lane
//   sum_lanes(v)                        of LANES vectors: lane i is the sum of the lanes of v[i]
#include "each.h"

constexpr int GROUP = 4;  // heads whose scores share a vector

// e**x for x <= 0; NaN stays NaN, less than e**-88 is 0
ALWAYS_INLINE Vec exp(Vec x) {
    constexpr double ln2 = 0.693147180559945309, high = 355.0 / 512;  // n * high is exact
    const Vec magic = fill(12582912.0f);                              // 1.5 * 2**23: adding it rounds to an integer
    x = max(fill(-88.0f), x);
    const Vec shifted = fma(x, fill((float)(1 / ln2)), magic);
    const Vec n = sub(shifted, magic);
    const Vec r = fma(n, fill((float)(high - ln2)), fma(n, fill((float)-high), x));
    Vec sum = fill(1.0f / 5040);  // the series of e**r, |r| < 0.35: later terms are below 6e-9
    sum = fma(sum, r, fill(1.0f / 720));
    sum = fma(sum, r, fill(1.0f / 120));
    sum = fma(sum, r, fill(1.0f / 24));
    sum = fma(sum, r, fill(1.0f / 6));
    sum = fma(sum, r, fill(0.5f));
    sum = fma(sum, r, fill(1.0f));
    sum = fma(sum, r, fill(1.0f));
    return mul(sum, power_of_two(shifted));
}

// Products of H query heads, [H][stride], with LANES / H keys: lane [head][position]; `soon`: the keys to prefetch
template <int H>
ALWAYS_INLINE Vec products(const float *query, long stride, const float *const *keys, const float *const *soon, long width) {
    constexpr int POSITIONS = LANES / H;
    Vec acc[LANES], key[POSITIONS];
    each<0, LANES>([&](auto i) INLINE { acc[i] = fill(0); });
    const auto add_products = [&](long i) INLINE {
        each<0, H>([&](auto h) INLINE {
            const Vec q = in_register(load(query + h * stride + i));
            each<0, POSITIONS>([&](auto p) INLINE { acc[h * POSITIONS + p] = fma(q, key[p], acc[h * POSITIONS + p]); });
        });
    };
    long i = 0;
    for (; i + LANES <= width; i += LANES) {
        each<0, POSITIONS>([&](auto p) INLINE {
            key[p] = load(keys[p] + i);
            PREFETCH_FAR(soon[p] + i);
        });
        add_products(i);
    }
    if (i < width) {
        each<0, POSITIONS>([&](auto p) INLINE { key[p] = load_some(keys[p] + i, width - i); });
        add_products(i);
    }
    return sum_lanes(acc);
}

// Multiplies D vectors of H heads' sums, [H][stride], from `at` on, by a factor per head, and adds weights times values.
// `some`: the number of floats in a value's last vector; 0: it is full.
template <int H, int D>
ALWAYS_INLINE void add_values(const float *const *values, long count, const float *weights, const float *factors, float *sums,
                              long stride, long at, long some, const float *soon, long soon_stride) {
    constexpr int G = H < GROUP ? H : GROUP, GROUPS = H / G, POSITIONS = LANES / G;
    Vec acc[H * D], value[D];
    each<0, H>([&](auto h) INLINE {
        const Vec factor = fill(factors[h * POSITIONS]);
        each<0, D>([&](auto d) INLINE { acc[h * D + d] = mul(load(sums + h * stride + at + d * LANES), factor); });
    });
    for (long p = 0; p < count; p++) {
        const float *here = weights + p / POSITIONS * GROUPS * LANES + p % POSITIONS;
        if (D == 1 && some)
            value[0] = load_some(values[p] + at, some);
        else
            each<0, D>([&](auto d) INLINE {
                value[d] = load(values[p] + at + d * LANES);
                PREFETCH_FAR(soon + p * soon_stride + at + d * LANES);
            });
        each<0, H>([&](auto h) INLINE {
            const Vec weight = fill(here[h * POSITIONS]);
            each<0, D>([&](auto d) INLINE { acc[h * D + d] = fma(weight, value[d], acc[h * D + d]); });
        });
    }
    each<0, H>([&](auto h) INLINE {
        each<0, D>([&](auto d) INLINE { store(sums + h * stride + at + d * LANES, acc[h * D + d]); });
    });
}

template <int H>
ALWAYS_INLINE void add_values(const float *const *values, long count, const float *weights, const float *factors, float *sums,
                              long stride, long width, const float *soon, long soon_stride) {
    constexpr int WIDE = SUMS / H < 1 ? 1 : SUMS / H < 4 ? SUMS / H : 4;
    long at = 0;
    for (; at + WIDE * LANES <= width; at += WIDE * LANES)
        add_values<H, WIDE>(values, count, weights, factors, sums, stride, at, 0, soon, soon_stride);
    for (; at + LANES <= width; at += LANES) add_values<H, 1>(values, count, weights, factors, sums, stride, at, 0, soon, soon_stride);
    if (at < width) add_values<H, 1>(values, count, weights, factors, sums, stride, at, width - at, soon, soon_stride);
}

// Reduces lanes [head][position] with join(a, b): every position of a head gets the result of all its positions
template <int POSITIONS, class Join> ALWAYS_INLINE Vec joined(Vec v, Join join) {
    if constexpr (POSITIONS == 1) return v;
    alignas(64) float lanes[LANES];
    store(lanes, v);
    for (int first = 0; first < LANES; first += POSITIONS) {
        for (int p = 1; p < POSITIONS; p++) lanes[first] = join(lanes[first], lanes[first + p]);
        for (int p = 1; p < POSITIONS; p++) lanes[first + p] = lanes[first];
    }
    return load(lanes);
}

// Processes chunk after chunk: its scores, the rescaling of the sums for a new largest score, then its values.
template <int H> static void attend_heads(const Heads &heads, Positions positions) {
    constexpr int G = H < GROUP ? H : GROUP, GROUPS = H / G;
    constexpr int EACH = LANES / G;  // positions in one vector of scores
    alignas(64) float query[H * MAX_WIDTH], sums[H * MAX_WIDTH];
    alignas(64) float scores[H * CHUNK], factors[GROUPS * LANES];  // [CHUNK / EACH][GROUPS][G][EACH]
    const float *keys[CHUNK], *values[CHUNK];
    const long query_stride = (positions.key_width + LANES - 1) / LANES * LANES;
    const long sums_stride = (positions.value_width + LANES - 1) / LANES * LANES;
    memset(query, 0, H * query_stride * sizeof(float));
    memset(sums, 0, H * sums_stride * sizeof(float));
    for (long h = 0; h < heads.count; h++)
        memcpy(query + h * query_stride, heads.query + h * heads.query_stride, positions.key_width * sizeof(float));
    const Vec scale = fill(heads.scale);
    Vec top[GROUPS], total[GROUPS];
    each<0, GROUPS>([&](auto g) INLINE { top[g] = fill(-FLT_MAX), total[g] = fill(0); });
    while (const long count = positions.next(keys, values)) {
        const long vectors = (count + EACH - 1) / EACH;
        for (long p = count; p < vectors * EACH; p++) keys[p] = keys[count - 1], values[p] = values[count - 1];
        Vec highest[GROUPS];
        each<0, GROUPS>([&](auto g) INLINE { highest[g] = top[g]; });
        for (long i = 0; i < vectors; i++)
            each<0, GROUPS>([&](auto g) INLINE {
                float *const here = scores + (i * GROUPS + g) * LANES;
                const float *const of_group = query + g * G * query_stride;
                Vec score = mul(products<G>(of_group, query_stride, keys + i * EACH, (g == 0 ? values : keys) + i * EACH, positions.key_width), scale);
                store(here, score);
                if ((i + 1) * EACH > count) {
                    for (long lane = 0; lane < LANES; lane++)
                        if (i * EACH + lane % EACH >= count) here[lane] = -INFINITY;
                    score = load(here);
                }
                highest[g] = max(score, highest[g]);
            });
        each<0, GROUPS>([&](auto g) INLINE {
            highest[g] = joined<EACH>(highest[g], [](float a, float b) INLINE { return a > b ? a : b; });
            const Vec factor = exp(sub(top[g], highest[g]));
            store(factors + g * LANES, factor);
            total[g] = mul(total[g], factor);
            top[g] = highest[g];
        });
        for (long i = 0; i < vectors; i++)
            each<0, GROUPS>([&](auto g) INLINE {
                float *const here = scores + (i * GROUPS + g) * LANES;
                const Vec weight = exp(sub(load(here), top[g]));
                store(here, weight);
                total[g] = add(total[g], weight);
            });
        const float *soon = positions.is_at_end() ? heads.then : keys[count - 1] + positions.key_width;
        add_values<H>(values, count, scores, factors, sums, sums_stride, positions.value_width, soon, positions.key_width);
    }
    each<0, GROUPS>([&](auto g) INLINE {
        store(factors + g * LANES, joined<EACH>(total[g], [](float a, float b) INLINE { return a + b; }));
    });
    for (long h = 0; h < heads.count; h++)
        for (long i = 0; i < positions.value_width; i++)
            heads.out[h * positions.value_width + i] = sums[h * sums_stride + i] / factors[h * EACH];
}

static void attend(const Heads &heads, const Positions &positions) {
    if (heads.count > 4) return attend_heads<8>(heads, positions);
    if (heads.count > 2) return attend_heads<4>(heads, positions);
    if (heads.count > 1) return attend_heads<2>(heads, positions);
    attend_heads<1>(heads, positions);
}

static const Kernel kernel = {attend};
