// The loops for int4 weights, included after tiles.h in the namespace of each instruction set. Besides what stands there,
// it has defined:
//   low(v), high(v)                     the nibbles of each byte
//   dot4(sum, weights, digits)          as dot, for weights from 0 to 15 and at most 8 times into one sum
//   total(sum)                          the sum of these products in each lane
//   widen(p)                            LANES 16-bit integers
//   add_group(sums, hi, lo, digit_sum, group)
//                                       adds (128 * hi + lo - zero * digit_sum) * scale to LANES floats: a product, which
//                                       is rounded, and a sum
//
// Packed: [out / 64][in / 32] groups of 64 descriptions and [4][64][4] bytes. The byte [p][c][i] has input 8 * p + i of
// output c in its low nibble and input 8 * p + 4 + i in its high one. A description has the upper 12 bits of the scale, an
// fp32 number that is not negative, and below them the four of the zero point: a weight is (nibble - zero) * scale.

// Sums of each group of digits, 128 * hi + lo: [rows][groups]
static void add_up_groups(const int8_t *digits, long rows, long padded, int32_t *sums) {
    for (long r = 0; r < rows; r++, digits += 2 * padded)
        for (long group = 0; group < padded / GROUP; group++) {
            int32_t hi = 0, lo = 0;
            for (long i = group * GROUP; i < (group + 1) * GROUP; i++) {
                hi += digits[i];
                lo += digits[padded + i];
            }
            *sums++ = 128 * hi + lo;
        }
}

// Adds to sums, [R][STRIP], the products of R rows with `groups` groups of a strip; meanwhile fetches the lines from `ahead`
// on, 4 * LINES in each group and part of the strip.
template <int R, int LINES, int FIRST = 0>
ALWAYS_INLINE void add_group_products(const int8_t *digits, long padded, const int32_t *digit_sums, const uint8_t *weights,
                                      long groups, float *sums, const uint8_t *ahead) {
    constexpr int N = 2 * R, TILES = tiles_of(N);
    if constexpr (FIRST < STRIP / LANES) {
        for (long g = 0; g < groups; g++) {
            const uint8_t *descriptions = weights + g * GROUP_BYTES, *bytes = descriptions + 2 * STRIP;
            Vec acc[TILES * N], w[TILES];
            each<0, TILES * N>([&](auto i) INLINE { acc[i] = zero(); });
            each<0, 8>([&](auto half) INLINE {
                each<0, TILES>([&](auto t) INLINE {
                    const Vec both = load(bytes + (half / 2 * STRIP + (FIRST + t) * LANES) * 4);
                    w[t] = half % 2 ? high(both) : low(both);
                });
                each<0, N>([&](auto n) INLINE {
                    const Vec d = spread(digits + n * padded + g * GROUP + half * 4);
                    each<0, TILES>([&](auto t) INLINE { dot4(acc[t * N + n], w[t], d); });
                });
                if constexpr (half % 2 == 0)
                    each<0, LINES>([&](auto line) INLINE { PREFETCH_FAR(ahead + ((g * 4 + half / 2) * LINES + line) * LINE); });
            });
            each<0, TILES>([&](auto t) INLINE {
                const Vec group = widen(descriptions + (FIRST + t) * LANES * 2);
                each<0, R>([&](auto r) INLINE {
                    const Vec digit_sum = spread((const int8_t *)(digit_sums + r * (padded / GROUP) + g));
                    add_group(sums + r * STRIP + (FIRST + t) * LANES, total(acc[t * N + 2 * r]),
                              total(acc[t * N + 2 * r + 1]), digit_sum, group);
                });
            });
        }
        add_group_products<R, LINES, FIRST + TILES>(digits, padded, digit_sums, weights, groups, sums,
                                                    ahead + groups * 4 * LINES * LINE);
    }
}

// As add_rows, for groups
template <int R>
static void add_rows4(const int8_t *digits, long padded, const int32_t *digit_sums, const uint8_t *weights, long groups,
                      float *sums, long pass, long passes) {
    constexpr int PARTS = STRIP / LANES / tiles_of(2 * R), ALL = (GROUP_BYTES / LINE + 4 * PARTS - 1) / (4 * PARTS);
    constexpr int HALF = (ALL + 1) / 2, QUARTER = (ALL + 3) / 4;
    const uint8_t *ahead = weights + groups * GROUP_BYTES;
    const long lines = 4 * PARTS * groups * pass;
    if (passes == 1)
        add_group_products<R, PARTS == 1 ? 0 : ALL>(digits, padded, digit_sums, weights, groups, sums, ahead);
    else if (passes < 4)
        add_group_products<R, HALF>(digits, padded, digit_sums, weights, groups, sums, ahead + HALF * lines * LINE);
    else
        add_group_products<R, QUARTER>(digits, padded, digit_sums, weights, groups, sums, ahead + QUARTER * lines * LINE);
}

// Strips first to last of y = x @ weight.T
static void times_strips4(const Activations &x, const Weight &weight, float *y, long first, long last) {
    constexpr long BLOCK = 32, CHUNK = 8;  // rows whose sums are kept, groups that stay in the first cache
    alignas(64) float sums[BLOCK * STRIP];
    const long all_groups = x.padded / GROUP;
    for (long strip = first; strip < last; strip++) {
        const uint8_t *weights = weight.packed + strip * all_groups * GROUP_BYTES;
        const long left = weight.out - strip * STRIP, channels = left < STRIP ? left : STRIP;
        for (long row = 0; row < x.rows; row += BLOCK) {
            const long rows = x.rows - row < BLOCK ? x.rows - row : BLOCK, passes = (rows + ROWS - 1) / ROWS;
            const bool is_stream = passes == 1 && tiles_of(2 * rows) * LANES == STRIP;
            memset(sums, 0, rows * STRIP * sizeof *sums);
            for (long g = 0, groups; g < all_groups; g += groups) {
                groups = is_stream || all_groups - g < CHUNK ? all_groups - g : CHUNK;
                long r = 0;
                for (long pass = 0; pass < passes; pass++) {
                    const long count = (rows - r + passes - pass - 1) / (passes - pass);  // as even as possible
                    const int8_t *digits = x.digits + (row + r) * 2 * x.padded + g * GROUP;
                    const int32_t *digit_sums = x.group_sums + (row + r) * all_groups + g;
                    each<1, ROWS + 1>([&](auto R) INLINE {
                        if (count == R)
                            add_rows4<R>(digits, x.padded, digit_sums, weights + g * GROUP_BYTES, groups, sums + r * STRIP,
                                         pass, passes);
                    });
                    r += count;
                }
            }
            for (long r = 0; r < rows; r++)
                for (long c = 0; c < channels; c++)
                    y[(row + r) * weight.out + strip * STRIP + c] = sums[r * STRIP + c] * x.units[row + r];
        }
    }
}

static const Kernel kernel = {make_digits, times_strips, times_columns, add_up_groups, times_strips4};
