// Attention of one new position of every row, fp32, on keys and values in the pages where they lie. All query heads that
// share a key are computed together, so that keys and values are read once. Each row is summed in the order of its
// positions, in chunks that start at its first position: no bit depends on other rows, pages or threads.
//
// Needs a C++17 compiler and nothing else; called from Python through the functions at the end of this file.
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "exported.h"
#include "platform.h"
#include "threads.h"

namespace {

constexpr long MAX_WIDTH = 1024;  // of a key or a value; limits the arrays on the stack
constexpr long MOST_HEADS = 8;    // computed together
constexpr long CHUNK = 64;        // positions whose keys and values fit into the L1 cache

// Structures that Python writes, made of 64-bit integers

// The keys or the values of one block in one page, [rows][heads][capacity][width]
struct Channel {
    float *data;  // null: another dtype, or not in this machine's memory
    int64_t heads, width;
};

// Positions start to start + count of one row of a page
struct Part {
    const Channel *channels;  // of the page
    int64_t capacity, row, start, count;
    int64_t run;  // index into key_channels and value_channels
};

struct Rows {
    const Part *parts;
    const int64_t *firsts;  // [rows + 1]: the first part of each row
    int64_t count;
    const int64_t *key_channels, *value_channels;  // of each run

    const Channel &keys(const Part &part) const { return part.channels[key_channels[part.run]]; }
    const Channel &values(const Part &part) const { return part.channels[value_channels[part.run]]; }
};

float *address(const Part &part, const Channel &channel, long head, long position) {
    return channel.data + ((part.row * channel.heads + head) * part.capacity + position) * channel.width;
}

// The positions of one row as one of its kv heads sees them, in order
class Positions {
  public:
    const long key_width, value_width;

    Positions(const Rows &rows, long row, long head)
        : key_width(rows.keys(rows.parts[rows.firsts[row]]).width), value_width(rows.values(rows.parts[rows.firsts[row]]).width),
          rows(rows), part(rows.parts + rows.firsts[row]), end(rows.parts + rows.firsts[row + 1]), head(head) {}

    // Finds the next keys and values, at most CHUNK; returns how many.
    long next(const float **keys, const float **values) {
        long count = 0;
        while (part < end && count < CHUNK) {
            const float *key = address(*part, rows.keys(*part), head, part->start + done);
            const float *value = address(*part, rows.values(*part), head, part->start + done);
            const long left = part->count - done, here = left < CHUNK - count ? left : CHUNK - count;
            for (long i = 0; i < here; i++) keys[count + i] = key + i * key_width;
            for (long i = 0; i < here; i++) values[count + i] = value + i * value_width;
            count += here;
            done += here;
            if (done == part->count) {
                part++;
                done = 0;
            }
        }
        return count;
    }

    bool is_at_end() const { return part == end; }

  private:
    const Rows &rows;
    const Part *part, *const end;
    const long head;
    long done = 0;  // positions of the current part
};

// Query heads of one row that share a kv head
struct Heads {
    const float *query;  // [count][query_stride]
    long query_stride;
    float *out;  // [count][width of the values]
    long count;
    float scale;
    const float *then;  // the keys to read next
};

struct Kernel {
    void (*attend)(const Heads &, const Positions &);
};

// ------------------------------------------------------------ one namespace for each instruction set

namespace generic {
struct Vec {
    float lane[4];
};
constexpr int LANES = 4, SUMS = 8;
template <class F> ALWAYS_INLINE Vec lanes(F of_lane) { return {{of_lane(0), of_lane(1), of_lane(2), of_lane(3)}}; }
ALWAYS_INLINE Vec fill(float x) { return {{x, x, x, x}}; }
ALWAYS_INLINE Vec load(const float *p) { Vec v; memcpy(&v, p, 16); return v; }
ALWAYS_INLINE Vec in_register(Vec v) { return v; }
ALWAYS_INLINE Vec load_some(const float *p, long n) { Vec v = fill(0); memcpy(&v, p, n * 4); return v; }
ALWAYS_INLINE void store(float *p, Vec v) { memcpy(p, &v, 16); }
ALWAYS_INLINE Vec add(Vec a, Vec b) { return lanes([&](int i) INLINE { return a.lane[i] + b.lane[i]; }); }
ALWAYS_INLINE Vec sub(Vec a, Vec b) { return lanes([&](int i) INLINE { return a.lane[i] - b.lane[i]; }); }
ALWAYS_INLINE Vec mul(Vec a, Vec b) { return lanes([&](int i) INLINE { return a.lane[i] * b.lane[i]; }); }
ALWAYS_INLINE Vec max(Vec a, Vec b) { return lanes([&](int i) INLINE { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; }); }
ALWAYS_INLINE Vec fma(Vec a, Vec b, Vec c) { return add(mul(a, b), c); }
ALWAYS_INLINE Vec power_of_two(Vec v) {
    uint32_t bits[4];
    memcpy(bits, &v, 16);
    for (auto &of_lane : bits) of_lane = (of_lane << 23) + 0x3f800000u;
    memcpy(&v, bits, 16);
    return v;
}
ALWAYS_INLINE Vec sum_lanes(const Vec *v) {
    return lanes([&](int i) INLINE { return (v[i].lane[0] + v[i].lane[2]) + (v[i].lane[1] + v[i].lane[3]); });
}
#include "attend.h"
}  // namespace generic

#if X86
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
using Vec = __m256;
constexpr int LANES = 8, SUMS = 8;
ALWAYS_INLINE Vec fill(float x) { return _mm256_set1_ps(x); }
ALWAYS_INLINE Vec load(const float *p) { return _mm256_loadu_ps(p); }
ALWAYS_INLINE Vec in_register(Vec v) { __asm__("" : "+x"(v)); return v; }
ALWAYS_INLINE Vec load_some(const float *p, long n) {
    const __m256i numbers = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), numbers));
}
ALWAYS_INLINE void store(float *p, Vec v) { _mm256_storeu_ps(p, v); }
ALWAYS_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
ALWAYS_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
ALWAYS_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
ALWAYS_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
ALWAYS_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
ALWAYS_INLINE Vec power_of_two(Vec v) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(v), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(0x3f800000)));
}
// Returns in each 128-bit lane: the sums of a's, b's, c's and d's lane
ALWAYS_INLINE Vec sum_four(Vec a, Vec b, Vec c, Vec d) {
    const __m256d ab = _mm256_castps_pd(add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)));
    const __m256d cd = _mm256_castps_pd(add(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d)));
    return add(_mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)), _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)));
}
ALWAYS_INLINE Vec sum_lanes(const Vec *v) {
    const Vec low = sum_four(v[0], v[1], v[2], v[3]), high = sum_four(v[4], v[5], v[6], v[7]);
    return add(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}
#include "attend.h"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f")
#endif
namespace avx512 {
using Vec = __m512;
constexpr int LANES = 16, SUMS = 16;
ALWAYS_INLINE Vec fill(float x) { return _mm512_set1_ps(x); }
ALWAYS_INLINE Vec load(const float *p) { return _mm512_loadu_ps(p); }
ALWAYS_INLINE Vec in_register(Vec v) { __asm__("" : "+v"(v)); return v; }
ALWAYS_INLINE Vec load_some(const float *p, long n) { return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
ALWAYS_INLINE void store(float *p, Vec v) { _mm512_storeu_ps(p, v); }
ALWAYS_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
ALWAYS_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
ALWAYS_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
ALWAYS_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
ALWAYS_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
ALWAYS_INLINE Vec power_of_two(Vec v) {
    const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(v), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(0x3f800000)));
}
// Returns in each 128-bit lane: the sums of a's, b's, c's and d's lane
ALWAYS_INLINE Vec sum_four(Vec a, Vec b, Vec c, Vec d) {
    const __m512d ab = _mm512_castps_pd(add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    const __m512d cd = _mm512_castps_pd(add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    return add(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
}
// Returns four 128-bit lanes: a's lanes added in pairs, then b's
ALWAYS_INLINE Vec add_pairs(Vec a, Vec b) { return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd)); }
ALWAYS_INLINE Vec sum_lanes(const Vec *v) {
    const Vec low = add_pairs(sum_four(v[0], v[1], v[2], v[3]), sum_four(v[4], v[5], v[6], v[7]));
    const Vec high = add_pairs(sum_four(v[8], v[9], v[10], v[11]), sum_four(v[12], v[13], v[14], v[15]));
    return add_pairs(low, high);
}
#include "attend.h"
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // X86

#if ARM
namespace neon {
using Vec = float32x4_t;
constexpr int LANES = 4, SUMS = 16;
ALWAYS_INLINE Vec fill(float x) { return vdupq_n_f32(x); }
ALWAYS_INLINE Vec load(const float *p) { return vld1q_f32(p); }
ALWAYS_INLINE Vec in_register(Vec v) { __asm__("" : "+w"(v)); return v; }
ALWAYS_INLINE Vec load_some(const float *p, long n) {
    float some[4] = {};
    memcpy(some, p, n * 4);
    return vld1q_f32(some);
}
ALWAYS_INLINE void store(float *p, Vec v) { vst1q_f32(p, v); }
ALWAYS_INLINE Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
ALWAYS_INLINE Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
ALWAYS_INLINE Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
ALWAYS_INLINE Vec max(Vec a, Vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
ALWAYS_INLINE Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
ALWAYS_INLINE Vec power_of_two(Vec v) {
    const int32x4_t exponent = vshlq_n_s32(vreinterpretq_s32_f32(v), 23);
    return vreinterpretq_f32_s32(vaddq_s32(exponent, vdupq_n_s32(0x3f800000)));
}
ALWAYS_INLINE Vec sum_lanes(const Vec *v) { return vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3])); }
#include "attend.h"
}  // namespace neon
#endif  // ARM

// ------------------------------------------------------------ choice of an instruction set

struct Choice {
    const char *name;
    const Kernel *kernel;
    bool runs_here;
};

// Best first
const std::vector<Choice> &choices() {
    static const std::vector<Choice> all = {
#if X86
        {"avx512", &avx512::kernel, bool(__builtin_cpu_supports("avx512f"))},
        {"avx2", &avx2::kernel, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
#endif
#if ARM
        {"neon", &neon::kernel, true},
#endif
        {"generic", &generic::kernel, true},
    };
    return all;
}

const Kernel *kernel_of(int isa) {
    return isa >= 0 && isa < (int)choices().size() && choices()[isa].runs_here ? choices()[isa].kernel : nullptr;
}

bool fits(const Channel &channel, const Channel &as) {
    return channel.data && channel.heads == as.heads && channel.width == as.width && channel.width <= MAX_WIDTH;
}

// Returns whether all rows have positions, with keys and values in the same layout as the first row's
bool alike(const Rows &rows) {
    for (long row = 0; row < rows.count; row++)
        if (rows.firsts[row] == rows.firsts[row + 1]) return false;
    const Channel &keys = rows.keys(rows.parts[0]), &values = rows.values(rows.parts[0]);
    for (const Part *part = rows.parts; part < rows.parts + rows.firsts[rows.count]; part++)
        if (part->count <= 0 || !fits(rows.keys(*part), keys) || !fits(rows.values(*part), values)) return false;
    return keys.heads == values.heads;
}

long length_of(const Rows &rows, long row) {
    long length = 0;
    for (long i = rows.firsts[row]; i < rows.firsts[row + 1]; i++) length += rows.parts[i].count;
    return length;
}

}  // namespace

// ------------------------------------------------------------ functions for Python

// Returns the name of the instruction set with this number, best first; null after the last.
EXPORT const char *swarm_attention_isa_name(int isa) { return isa < (int)choices().size() ? choices()[isa].name : nullptr; }
EXPORT int swarm_attention_isa_runs_here(int isa) { return kernel_of(isa) != nullptr; }

// Writes keys: [rows][heads][width] and values: [rows][heads][value_width], with these strides between rows and heads, to
// the last position of each row. Returns 0, or -1: the pages do not fit, and nothing was written.
EXPORT int swarm_store(const void *parts, const int64_t *firsts, long count, const int64_t *key_channels,
                       const int64_t *value_channels, const float *keys, long key_row, long key_head, const float *values,
                       long value_row, long value_head, long heads, long width, long value_width) {
    const Rows rows{static_cast<const Part *>(parts), firsts, count, key_channels, value_channels};
    if (!count) return 0;
    if (!alike(rows)) return -1;
    const Channel &like = rows.keys(rows.parts[0]);
    if (like.heads != heads || like.width != width || rows.values(rows.parts[0]).width != value_width) return -1;
    for (long row = 0; row < count; row++) {
        const Part &part = rows.parts[firsts[row + 1] - 1];
        const long last = part.start + part.count - 1;
        for (long head = 0; head < heads; head++) {
            memcpy(address(part, rows.keys(part), head, last), keys + row * key_row + head * key_head, width * 4);
            memcpy(address(part, rows.values(part), head, last), values + row * value_row + head * value_head, value_width * 4);
        }
    }
    return 0;
}

// Computes out: [rows][heads][value_width] = softmax(query @ keys.T * scale) @ values;
// query: [rows][heads][width], with these strides. Query head h uses kv head h / (heads / kv_heads). Returns 0, or -1: the
// pages do not fit, or there is no such kernel.
EXPORT int swarm_attend(const void *parts, const int64_t *firsts, long count, const int64_t *key_channels,
                        const int64_t *value_channels, const float *query, long query_row, long query_head, long heads,
                        long width, long value_width, float scale, float *out, int isa, int threads) {
    const Rows rows{static_cast<const Part *>(parts), firsts, count, key_channels, value_channels};
    const Kernel *kernel = kernel_of(isa);
    if (!count) return 0;
    if (!kernel || !alike(rows)) return -1;
    const long kv_heads = rows.keys(rows.parts[0]).heads;
    if (rows.keys(rows.parts[0]).width != width || rows.values(rows.parts[0]).width != value_width) return -1;
    if (kv_heads <= 0 || heads % kv_heads) return -1;
    const long shared = heads / kv_heads, steps = (shared + MOST_HEADS - 1) / MOST_HEADS;
    long total = 0;  // the work, counted in positions
    for (long row = 0; row < count; row++) total += length_of(rows, row) * kv_heads * steps;
    const long products = total / steps * shared * (width + value_width) * 4;  // a float product costs four byte products
    over(total, products, threads, [&](long first, long last) {
        long at = 0;
        for (long row = 0; row < count; row++) {
            const long length = length_of(rows, row);
            for (long step = 0; step < kv_heads * steps; step++, at += length) {
                if (at < first || at >= last) continue;
                const long kv_head = step / steps, done = step % steps * MOST_HEADS, head = kv_head * shared + done;
                const long left = shared - done;
                const bool last_of_row = step + 1 == kv_heads * steps;
                const Part &then = rows.parts[firsts[last_of_row && row + 1 < count ? row + 1 : row]];
                const Heads here{query + row * query_row + head * query_head, query_head,
                                 out + (row * heads + head) * value_width,
                                 left < MOST_HEADS ? left : MOST_HEADS, scale,
                                 address(then, rows.keys(then), last_of_row ? 0 : (step + 1) / steps, then.start)};
                kernel->attend(here, Positions(rows, row, kv_head));
            }
        }
    });
    return 0;
}
