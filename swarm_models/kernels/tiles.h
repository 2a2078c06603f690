// The loops of the kernel, for one instruction set: kernel.cpp includes this file once for each, inside a namespace in
// which the compiler may use that set and which has defined, for vectors of LANES 32-bit lanes:
//   Vec                                 the vector
//   REGISTERS                           how many of them there are
//   ROWS                                rows at a time, at most 4
//   zero(), load(p), store(p, v)        p: 32-bit integers of any alignment
//   spread(p)                           four bytes in every lane
//   transpose(v)                        the 4 x 4 bytes of each 128 bits transposed
//   dot(sum, weights, digits)           adds to each lane four products of stored weights and digits
//   OFFSET                              the excess of the weights in these products: 128, or 0

#include "each.h"

// x, [rows][width], times factor, [width] unless null: as digits [rows][2][padded], hi and lo, their sums [rows][2]
// and units [rows], with x ~ unit * (128 * hi + lo). The unit of a row that is not finite is NaN.
static void make_digits(const float *x, const float *factor, long rows, long width, long padded, int8_t *digits,
                        int32_t *sums, float *units, float *scaled) {
    for (long r = 0; r < rows; r++, x += width, digits += 2 * padded) {
        const float *row = x;
        if (factor) {
            for (long i = 0; i < width; i++) scaled[i] = x[i] * factor[i];
            row = scaled;
        }
        uint32_t top_bits = 0;  // bits of unsigned floats sort like the numbers, with NaN above infinity
        for (long i = 0; i < width; i++) {
            uint32_t bits;
            memcpy(&bits, row + i, 4);
            bits &= 0x7fffffffu;
            top_bits = bits > top_bits ? bits : top_bits;
        }
        float top;
        memcpy(&top, &top_bits, 4);
        const bool finite = top_bits < 0x7f800000u;
        const float unit = top / 8192;  // exact unless subnormal, since 8192 is a power of two
        float per_unit = finite && top > 0 ? 1 / unit : 0;
        if (!(per_unit < INFINITY)) per_unit = 0;  // rows of numbers below 2**-115 become zeros
        const float magic = 12582912.0f;  // 1.5 * 2**23: adding it rounds to the nearest integer, ties to even
        int32_t sum_hi = 0, sum_lo = 0;
        for (long i = 0; i < width; i++) {
            const float shifted = row[i] * per_unit + magic;
            int32_t n;
            memcpy(&n, &shifted, 4);
            n -= 0x4b400000;
            const int32_t hi = (n + 64) >> 7, lo = n - hi * 128;
            digits[i] = (int8_t)hi;
            digits[padded + i] = (int8_t)lo;
            sum_hi += (int8_t)hi;
            sum_lo += (int8_t)lo;
        }
        memset(digits + width, 0, padded - width);
        memset(digits + padded + width, 0, padded - width);
        sums[2 * r] = sum_hi;
        sums[2 * r + 1] = sum_lo;
        units[r] = finite ? unit : NAN;
    }
}

// Returns (128 * hi + lo) * unit, from two sums of products and the sums of their digits
static inline float combined(int32_t hi, int32_t lo, const int32_t *sums, float unit) {
    return ((float)(hi - OFFSET * sums[0]) * 128 + (float)(lo - OFFSET * sums[1])) * unit;
}

// Returns how many output vectors to keep in registers, with room for their weights, digits and two more
constexpr int tiles_of(int vectors) {
    int tiles = STRIP / LANES;
    while (tiles > 1 && tiles * vectors + tiles + 3 > REGISTERS) tiles /= 2;
    return tiles;
}

// Adds to sums, [N][STRIP], the products of N digit vectors with `steps` times four inputs of a strip, [steps][STRIP][4];
// meanwhile fetches the lines from `ahead` on, LINES in each step and part of the strip.
template <int N, int LINES, int FIRST = 0>
ALWAYS_INLINE void add_products(const int8_t *digits, long padded, const uint8_t *weights, long steps, int32_t *sums,
                                const uint8_t *ahead) {
    constexpr int TILES = tiles_of(N);
    if constexpr (FIRST < STRIP / LANES) {
        Vec acc[TILES * N], w[TILES];
        each<0, TILES>([&](auto t) INLINE {
            each<0, N>([&](auto n) INLINE { acc[t * N + n] = load(sums + n * STRIP + (FIRST + t) * LANES); });
        });
        for (long k = 0; k < steps; k++) {
            const uint8_t *here = weights + k * STRIP * 4 + FIRST * LANES * 4;
            each<0, LINES>([&](auto line) INLINE { PREFETCH_FAR(ahead + (k * LINES + line) * LINE); });
            each<0, TILES>([&](auto t) INLINE { w[t] = load(here + t * LANES * 4); });
            each<0, N>([&](auto n) INLINE {
                const Vec d = spread(digits + n * padded + 4 * k);
                each<0, TILES>([&](auto t) INLINE { dot(acc[t * N + n], w[t], d); });
            });
        }
        each<0, TILES>([&](auto t) INLINE {
            each<0, N>([&](auto n) INLINE { store(sums + n * STRIP + (FIRST + t) * LANES, acc[t * N + n]); });
        });
        add_products<N, LINES, FIRST + TILES>(digits, padded, weights, steps, sums, ahead + steps * LINES * LINE);
    }
}

// Multiplies R rows by `steps` times four inputs of a strip. It prefetches the next equally large piece of memory, spread
// evenly over `passes` calls, one per group of rows; this call is number `pass`. Inlined into its caller, it is 9 % slower.
template <int R>
NEVER_INLINE static void add_rows(const int8_t *digits, long padded, const uint8_t *weights, long steps, int32_t *sums,
                                  long pass, long passes) {
    constexpr int PARTS = STRIP / LANES / tiles_of(2 * R), ALL = STRIP * 4 / LINE / PARTS;  // lines per step
    constexpr int HALF = (ALL + 1) / 2, QUARTER = (ALL + 3) / 4;
    const uint8_t *ahead = weights + steps * STRIP * 4;
    if (passes == 1)  // whole strips are one stream, which the processor prefetches better itself
        add_products<2 * R, PARTS == 1 ? 0 : ALL>(digits, padded, weights, steps, sums, ahead);
    else if (passes < 4)
        add_products<2 * R, HALF>(digits, padded, weights, steps, sums, ahead + pass * PARTS * HALF * steps * LINE);
    else
        add_products<2 * R, QUARTER>(digits, padded, weights, steps, sums, ahead + pass * PARTS * QUARTER * steps * LINE);
}

// Calls add(R, first, pass, passes) for groups of R rows, at most ROWS and as even as possible, until all rows are covered
template <class Add> ALWAYS_INLINE void by_rows(long rows, const Add &add) {
    const long passes = (rows + ROWS - 1) / ROWS;
    long first = 0;
    for (long pass = 0; pass < passes; pass++) {
        const long count = (rows - first + passes - pass - 1) / (passes - pass);
        each<1, ROWS + 1>([&](auto R) INLINE {
            if (count == R) add(R, first, pass, passes);
        });
        first += count;
    }
}

// Computes strips first to last of y = x @ weight.T
static void times_strips(const Activations &x, const Weight &weight, float *y, long first, long last) {
    constexpr long BLOCK = 32;  // rows whose sums are kept in memory
    constexpr long CHUNK = 64;  // steps whose weights stay in the L1 cache while all these rows are multiplied
    alignas(64) int32_t sums[2 * BLOCK * STRIP];
    const long all_steps = x.padded / 4;
    for (long strip = first; strip < last; strip++) {
        const uint8_t *weights = weight.packed + strip * STRIP * x.padded;
        const float *scale = weight.scale + strip * STRIP;
        const long left = weight.out - strip * STRIP, channels = left < STRIP ? left : STRIP;
        for (long row = 0; row < x.rows; row += BLOCK) {
            const long rows = x.rows - row < BLOCK ? x.rows - row : BLOCK;
            const bool is_stream = rows <= ROWS && tiles_of(2 * rows) * LANES == STRIP;
            memset(sums, 0, 2 * rows * STRIP * sizeof *sums);
            for (long k = 0, steps; k < all_steps; k += steps) {
                steps = is_stream || all_steps - k < CHUNK ? all_steps - k : CHUNK;
                by_rows(rows, [&](auto R, long r, long pass, long passes) INLINE {
                    const int8_t *digits = x.digits + (row + r) * 2 * x.padded + 4 * k;
                    add_rows<R>(digits, x.padded, weights + k * STRIP * 4, steps, sums + 2 * r * STRIP, pass, passes);
                });
            }
            for (long r = 0; r < rows; r++) {
                const int32_t *hi = sums + 2 * r * STRIP, *lo = hi + STRIP;
                float *to = y + (row + r) * weight.out + strip * STRIP;
                for (long c = 0; c < channels; c++)
                    to[c] = combined(hi[c], lo[c], x.sums + 2 * (row + r), x.units[row + r]) * scale[c];
            }
        }
    }
}

// Packs a part of a weight as that of the transposed weight: inputs from 4 * group on, `groups` times four, as a strip of
// `steps` times four outputs, the first of which begins a strip of the weight -> turned: [steps][STRIP][4]
static void turn(const Weight &weight, long group, long groups, long output, long steps, uint8_t *turned) {
    constexpr long PIECES = LANES / 4;  // times four outputs in a vector
    const long width4 = (weight.in + 3) / 4 * 4;
    alignas(64) int32_t lanes[LANES];
    for (long step = 0; step < steps; step += STRIP / 4) {
        const uint8_t *weights = weight.packed + (output + 4 * step) * width4 + group * STRIP * 4;
        for (long g = 0; g < groups; g++)
            for (long part = 0; part < STRIP / LANES; part++) {
                store(lanes, transpose(load(weights + g * STRIP * 4 + part * LANES * 4)));
                for (long piece = 0; piece < PIECES; piece++)
                    memcpy(turned + ((step + part * PIECES + piece) * STRIP + 4 * g) * 4, lanes + 4 * piece, 16);
            }
    }
}

// Computes strips of 64 inputs first to last of y = grad @ q; grad is already multiplied by the scales
static void times_columns(const Activations &grad, const Weight &weight, float *y, long first, long last) {
    constexpr long BLOCK = 128;  // rows for which a part of the weight is turned once
    constexpr long CHUNK = 64;   // steps that are turned at a time, and then stay in the L1 cache
    alignas(64) int32_t sums[2 * BLOCK * STRIP];
    alignas(64) uint8_t turned[CHUNK * STRIP * 4] = {};
    const long all_steps = grad.padded / 4, all_groups = (weight.in + 3) / 4;
    for (long strip = first; strip < last; strip++) {
        const long group = strip * STRIP / 4, groups = all_groups - group < STRIP / 4 ? all_groups - group : STRIP / 4;
        const long left = weight.in - strip * STRIP, channels = left < STRIP ? left : STRIP;
        for (long row = 0; row < grad.rows; row += BLOCK) {
            const long rows = grad.rows - row < BLOCK ? grad.rows - row : BLOCK;
            memset(sums, 0, 2 * rows * STRIP * sizeof *sums);
            for (long k = 0, steps; k < all_steps; k += steps) {
                steps = all_steps - k < CHUNK ? all_steps - k : CHUNK;
                turn(weight, group, groups, 4 * k, steps, turned);
                by_rows(rows, [&](auto R, long r, long, long) INLINE {
                    const int8_t *digits = grad.digits + (row + r) * 2 * grad.padded + 4 * k;
                    add_products<2 * R, 0>(digits, grad.padded, turned, steps, sums + 2 * r * STRIP, turned);
                });
            }
            for (long r = 0; r < rows; r++) {
                const int32_t *hi = sums + 2 * r * STRIP, *lo = hi + STRIP;
                float *to = y + (row + r) * weight.in + strip * STRIP;
                for (long c = 0; c < channels; c++)
                    to[c] = combined(hi[c], lo[c], grad.sums + 2 * (row + r), grad.units[row + r]);
            }
        }
    }
}
