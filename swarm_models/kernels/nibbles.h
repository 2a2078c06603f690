// The loops for int4 weights, included after tiles.h in the namespace of each instruction set. The namespace must define,
// besides what tiles.h needs:
//   low(v), high(v)                     the nibbles of each byte
//   dot4(sum, weights, digits)          like dot, for weights from 0 to 15 and at most 8 times into one sum
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

// Adds to sums, [rows][STRIP], the products of rows with one group of a strip, part by part: a part's weights stay in
// registers for all rows.
template <int FIRST = 0>
ALWAYS_INLINE void add_group_products(const int8_t *digits, long rows, long padded, const int32_t *digit_sums,
                                      const uint8_t *group, float *sums) {
    constexpr int TILES = REGISTERS >= 32 ? 2 : 1, HALVES = GROUP / 4;
    if constexpr (FIRST < STRIP / LANES) {
        Vec w[HALVES * TILES];
        each<0, HALVES * TILES>([&](auto i) INLINE {
            const Vec both = load(group + 2 * STRIP + (i / TILES / 2 * STRIP + (FIRST + i % TILES) * LANES) * 4);
            w[i] = i / TILES % 2 ? high(both) : low(both);
        });
        for (long r = 0; r < rows; r++) {
            const int8_t *hi_digits = digits + r * 2 * padded, *lo_digits = hi_digits + padded;
            Vec hi[TILES], lo[TILES];
            each<0, TILES>([&](auto t) INLINE { hi[t] = lo[t] = zero(); });
            each<0, HALVES>([&](auto half) INLINE {
                const Vec d = spread(hi_digits + half * 4), e = spread(lo_digits + half * 4);
                each<0, TILES>([&](auto t) INLINE { dot4(hi[t], w[half * TILES + t], d); });
                each<0, TILES>([&](auto t) INLINE { dot4(lo[t], w[half * TILES + t], e); });
            });
            const Vec digit_sum = spread((const int8_t *)(digit_sums + r * (padded / GROUP)));
            each<0, TILES>([&](auto t) INLINE {
                add_group(sums + r * STRIP + (FIRST + t) * LANES, total(hi[t]), total(lo[t]), digit_sum,
                          widen(group + (FIRST + t) * LANES * 2));
            });
        }
        add_group_products<FIRST + TILES>(digits, rows, padded, digit_sums, group, sums);
    }
}

// Computes strips first to last of y = x @ weight.T
static void times_strips4(const Activations &x, const Weight &weight, float *y, long first, long last) {
    constexpr long BLOCK = 32;  // rows whose sums are kept in memory
    constexpr long ROWS4 = 8;   // rows whose digits fit into the L1 cache together
    constexpr long CHUNK = 8;   // groups whose weights fit into the L1 cache, too
    alignas(64) float sums[BLOCK * STRIP];
    const long all_groups = x.padded / GROUP;
    for (long strip = first; strip < last; strip++) {
        const uint8_t *weights = weight.packed + strip * all_groups * GROUP_BYTES;
        const long left = weight.out - strip * STRIP, channels = left < STRIP ? left : STRIP;
        for (long row = 0; row < x.rows; row += BLOCK) {
            const long rows = x.rows - row < BLOCK ? x.rows - row : BLOCK;
            memset(sums, 0, rows * STRIP * sizeof *sums);
            for (long begin = 0; begin < all_groups; begin += CHUNK) {
                const long end = begin + CHUNK < all_groups ? begin + CHUNK : all_groups;
                for (long r = 0; r < rows; r += ROWS4)
                    for (long g = begin; g < end; g++) {
                        const uint8_t *group = weights + g * GROUP_BYTES;
                        if (r == 0)  // even for one row: the processor's own prefetch is too late
                            for (long i = 0; i < GROUP_BYTES; i += LINE) PREFETCH_NEAR(group + CHUNK * GROUP_BYTES + i);
                        add_group_products(x.digits + (row + r) * 2 * x.padded + g * GROUP, rows - r < ROWS4 ? rows - r : ROWS4,
                                           x.padded, x.group_sums + (row + r) * all_groups + g, group, sums + r * STRIP);
                    }
            }
            for (long r = 0; r < rows; r++)
                for (long c = 0; c < channels; c++)
                    y[(row + r) * weight.out + strip * STRIP + c] = sums[r * STRIP + c] * x.units[row + r];
        }
    }
}

static const Kernel kernel = {make_digits, times_strips, times_columns, add_up_groups, times_strips4};
