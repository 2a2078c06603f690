// int8 linear on CPU: x [rows, in] fp32 times a packed int8 weight [out, in] with a scale per output, and the product with
// its transpose from the same packed bytes. Each row of x has its own unit, and is written in it with two digits to base
// 128, so that a product is exact in integers and no bit of a row depends on the other rows.
//
// Packed: [out / 64][in / 4][64][4] unsigned bytes, weight + 128; padding is 128. One strip of 64 outputs is read as one
// stream: four streams of 16 outputs each would take 12 % longer. The digits are -64 to 64, so that AVX2's sums of two
// products in 16 bits cannot overflow: 2 * 255 * 64 < 2**15.
//
// Needs a C++17 compiler and nothing else; called from Python through the functions at the end of this file.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "exported.h"
#include "platform.h"
#include "threads.h"

static constexpr long STRIP = 64;  // outputs that are packed together
static constexpr long LINE = 64;   // bytes per read of memory
static constexpr long GROUP = 32;  // inputs that share a scale in int4
static constexpr long GROUP_BYTES = 2 * STRIP + GROUP / 2 * STRIP;

namespace {

// Rows as digits
struct Activations {
    long rows, padded;
    const int8_t *digits;  // [rows][2][padded]
    const int32_t *sums;   // [rows][2]
    const float *units;    // [rows]
    const int32_t *group_sums;  // [rows][padded / GROUP]; for int4 alone
};

struct Weight {
    long out, in;
    const uint8_t *packed;
    const float *scale;  // int4: null
};

struct Kernel {
    void (*make_digits)(const float *x, const float *factor, long rows, long width, long padded, int8_t *digits,
                        int32_t *sums, float *units, float *scaled);
    void (*times_strips)(const Activations &, const Weight &, float *y, long first, long last);
    void (*times_columns)(const Activations &, const Weight &, float *y, long first, long last);
    void (*add_up_groups)(const int8_t *digits, long rows, long padded, int32_t *sums);
    void (*times_strips4)(const Activations &, const Weight &, float *y, long first, long last);
};

// ------------------------------------------------------------ one namespace for each instruction set

namespace generic {
struct Vec {
    int32_t lane[4];
};
constexpr int LANES = 4, REGISTERS = 8, ROWS = 1, OFFSET = 128;
ALWAYS_INLINE Vec zero() { return {}; }
ALWAYS_INLINE Vec load(const void *p) { Vec v; memcpy(&v, p, 16); return v; }
ALWAYS_INLINE void store(int32_t *p, Vec v) { memcpy(p, &v, 16); }
ALWAYS_INLINE Vec spread(const int8_t *p) { Vec v; for (auto &lane : v.lane) memcpy(&lane, p, 4); return v; }
ALWAYS_INLINE Vec transpose(Vec v) {
    uint8_t from[16], to[16];
    memcpy(from, &v, 16);
    for (int i = 0; i < 16; i++) to[i] = from[i % 4 * 4 + i / 4];
    memcpy(&v, to, 16);
    return v;
}
ALWAYS_INLINE void dot(Vec &sum, Vec weights, Vec digits) {
    uint8_t w[16];
    int8_t d[16];
    memcpy(w, &weights, 16);
    memcpy(d, &digits, 16);
    for (int lane = 0; lane < 4; lane++)
        for (int i = 4 * lane; i < 4 * lane + 4; i++) sum.lane[lane] += w[i] * d[i];
}
ALWAYS_INLINE Vec low(Vec v) { for (auto &lane : v.lane) lane &= 0x0f0f0f0f; return v; }
ALWAYS_INLINE Vec high(Vec v) { for (auto &lane : v.lane) lane = lane >> 4 & 0x0f0f0f0f; return v; }
ALWAYS_INLINE void dot4(Vec &sum, Vec weights, Vec digits) { dot(sum, weights, digits); }
ALWAYS_INLINE Vec total(Vec sum) { return sum; }
ALWAYS_INLINE Vec widen(const uint8_t *p) {
    uint16_t from[4];
    memcpy(from, p, 8);
    return {{from[0], from[1], from[2], from[3]}};
}
ALWAYS_INLINE void add_group(float *sums, Vec hi, Vec lo, Vec digit_sum, Vec group) {
    for (int lane = 0; lane < 4; lane++) {
        const int32_t bits = (group.lane[lane] & 0xfff0) << 15;
        float scale;
        memcpy(&scale, &bits, 4);
        sums[lane] += (float)(128 * hi.lane[lane] + lo.lane[lane] - (group.lane[lane] & 15) * digit_sum.lane[lane]) * scale;
    }
}
#include "tiles.h"
#include "nibbles.h"
}  // namespace generic

#if X86
#define BYTES_OF_FOUR_TRANSPOSED 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
namespace avx2 {
using Vec = __m256i;
constexpr int LANES = 8, REGISTERS = 16, ROWS = 2, OFFSET = 128;
ALWAYS_INLINE Vec zero() { return _mm256_setzero_si256(); }
ALWAYS_INLINE Vec load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
ALWAYS_INLINE void store(int32_t *p, Vec v) { _mm256_storeu_si256((__m256i *)p, v); }
ALWAYS_INLINE Vec spread(const int8_t *p) { int32_t four; memcpy(&four, p, 4); return _mm256_set1_epi32(four); }
ALWAYS_INLINE Vec transpose(Vec v) {
    return _mm256_shuffle_epi8(v, _mm256_broadcastsi128_si256(_mm_setr_epi8(BYTES_OF_FOUR_TRANSPOSED)));
}
ALWAYS_INLINE void dot(Vec &sum, Vec weights, Vec digits) {
    const __m256i pairs = _mm256_maddubs_epi16(weights, digits);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
ALWAYS_INLINE Vec low(Vec v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
ALWAYS_INLINE Vec high(Vec v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }
ALWAYS_INLINE void dot4(Vec &sum, Vec weights, Vec digits) {  // in 16 bits: 8 * 2 * 15 * 64 < 2**15
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, digits));
}
ALWAYS_INLINE Vec total(Vec sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
ALWAYS_INLINE Vec widen(const uint8_t *p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)); }
ALWAYS_INLINE void add_group(float *sums, Vec hi, Vec lo, Vec digit_sum, Vec group) {
    const Vec zeros = _mm256_mullo_epi32(_mm256_and_si256(group, _mm256_set1_epi32(15)), digit_sum);
    const Vec product = _mm256_sub_epi32(_mm256_add_epi32(_mm256_slli_epi32(hi, 7), lo), zeros);
    const Vec scale = _mm256_slli_epi32(_mm256_and_si256(group, _mm256_set1_epi32(0xfff0)), 15);
    const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(product), _mm256_castsi256_ps(scale));
    _mm256_storeu_ps(sums, _mm256_add_ps(_mm256_loadu_ps(sums), scaled));
}
#include "tiles.h"
#include "nibbles.h"
}  // namespace avx2
namespace avx_vnni {
using avx2::add_group, avx2::high, avx2::load, avx2::low, avx2::spread, avx2::store, avx2::transpose;
using avx2::widen, avx2::zero;
using Vec = __m256i;
constexpr int LANES = 8, REGISTERS = 16, ROWS = 2, OFFSET = 128;
// as assembly, not an intrinsic: compilers older than the instruction can still assemble it by name
ALWAYS_INLINE void dot(Vec &sum, Vec weights, Vec digits) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(digits));
}
ALWAYS_INLINE void dot4(Vec &sum, Vec weights, Vec digits) { dot(sum, weights, digits); }
ALWAYS_INLINE Vec total(Vec sum) { return sum; }
#include "tiles.h"
#include "nibbles.h"
}  // namespace avx_vnni
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512vnni")
#endif
namespace avx512 {
using Vec = __m512i;
constexpr int LANES = 16, REGISTERS = 32, ROWS = 4, OFFSET = 128;
ALWAYS_INLINE Vec zero() { return _mm512_setzero_si512(); }
ALWAYS_INLINE Vec load(const void *p) { return _mm512_loadu_si512(p); }
ALWAYS_INLINE void store(int32_t *p, Vec v) { _mm512_storeu_si512(p, v); }
ALWAYS_INLINE Vec spread(const int8_t *p) { int32_t four; memcpy(&four, p, 4); return _mm512_set1_epi32(four); }
ALWAYS_INLINE Vec transpose(Vec v) {
    return _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(_mm_setr_epi8(BYTES_OF_FOUR_TRANSPOSED)));
}
ALWAYS_INLINE void dot(Vec &sum, Vec weights, Vec digits) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(digits));  // the intrinsic would copy every sum twice
}
ALWAYS_INLINE Vec low(Vec v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
ALWAYS_INLINE Vec high(Vec v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
ALWAYS_INLINE void dot4(Vec &sum, Vec weights, Vec digits) { dot(sum, weights, digits); }
ALWAYS_INLINE Vec total(Vec sum) { return sum; }
ALWAYS_INLINE Vec widen(const uint8_t *p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)); }
ALWAYS_INLINE void add_group(float *sums, Vec hi, Vec lo, Vec digit_sum, Vec group) {
    const Vec zeros = _mm512_mullo_epi32(_mm512_and_si512(group, _mm512_set1_epi32(15)), digit_sum);
    const Vec product = _mm512_sub_epi32(_mm512_add_epi32(_mm512_slli_epi32(hi, 7), lo), zeros);
    const Vec scale = _mm512_slli_epi32(_mm512_and_si512(group, _mm512_set1_epi32(0xfff0)), 15);
    const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(product), _mm512_castsi512_ps(scale));
    _mm512_storeu_ps(sums, _mm512_add_ps(_mm512_loadu_ps(sums), scaled));
}
#include "tiles.h"
#include "nibbles.h"
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // X86

#if ARM
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
namespace neon {
using Vec = int32x4_t;
constexpr int LANES = 4, REGISTERS = 32, ROWS = 4, OFFSET = 0;
ALWAYS_INLINE Vec zero() { return vdupq_n_s32(0); }
ALWAYS_INLINE Vec load(const void *p) { return vreinterpretq_s32_u8(vld1q_u8((const uint8_t *)p)); }
ALWAYS_INLINE void store(int32_t *p, Vec v) { vst1q_s32(p, v); }
ALWAYS_INLINE Vec spread(const int8_t *p) { int32_t four; memcpy(&four, p, 4); return vdupq_n_s32(four); }
ALWAYS_INLINE Vec transpose(Vec v) {
    const uint8x16_t from = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    return vreinterpretq_s32_u8(vqtbl1q_u8(vreinterpretq_u8_s32(v), from));
}
ALWAYS_INLINE void dot(Vec &sum, Vec weights, Vec digits) {  // both factors are signed
    const int8x16_t w = vreinterpretq_s8_u8(veorq_u8(vreinterpretq_u8_s32(weights), vdupq_n_u8(128)));
    sum = vdotq_s32(sum, w, vreinterpretq_s8_s32(digits));
}
ALWAYS_INLINE Vec low(Vec v) { return vandq_s32(v, vdupq_n_s32(0x0f0f0f0f)); }
ALWAYS_INLINE Vec high(Vec v) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(v), 4)); }
ALWAYS_INLINE void dot4(Vec &sum, Vec weights, Vec digits) {
    sum = vdotq_s32(sum, vreinterpretq_s8_s32(weights), vreinterpretq_s8_s32(digits));
}
ALWAYS_INLINE Vec total(Vec sum) { return sum; }
ALWAYS_INLINE Vec widen(const uint8_t *p) { return vreinterpretq_s32_u32(vmovl_u16(vld1_u16((const uint16_t *)p))); }
ALWAYS_INLINE void add_group(float *sums, Vec hi, Vec lo, Vec digit_sum, Vec group) {
    const Vec product = vmlsq_s32(vaddq_s32(vshlq_n_s32(hi, 7), lo), vandq_s32(group, vdupq_n_s32(15)), digit_sum);
    const Vec scale = vshlq_n_s32(vandq_s32(group, vdupq_n_s32(0xfff0)), 15);
    const float32x4_t scaled = vmulq_f32(vcvtq_f32_s32(product), vreinterpretq_f32_s32(scale));
    vst1q_f32(sums, vaddq_f32(vld1q_f32(sums), scaled));
}
#include "tiles.h"
#include "nibbles.h"
}  // namespace neon
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // ARM

// ------------------------------------------------------------ choice of an instruction set

struct Choice {
    const char *name;
    const Kernel *kernel;
    bool runs_here;
};

#if X86
bool has_avx_vnni() {  // CPUID 7.1: EAX bit 4; GCC 12 does not know its name
    unsigned eax, ebx, ecx, edx;
    __asm__("cpuid" : "=a"(eax), "=b"(ebx), "=c"(ecx), "=d"(edx) : "a"(7), "c"(0));
    if (eax < 1) return false;
    __asm__("cpuid" : "=a"(eax), "=b"(ebx), "=c"(ecx), "=d"(edx) : "a"(7), "c"(1));
    return eax >> 4 & 1;
}
#endif
#if ARM
bool has_dotprod() {
#if defined(__APPLE__)
    return true;
#elif defined(__linux__)
    return getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP
#else
    return false;
#endif
}
#endif

// Best first
const std::vector<Choice> &choices() {
    static const std::vector<Choice> all = {
#if X86
        {"avx512-vnni", &avx512::kernel,
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw")},
        {"avx-vnni", &avx_vnni::kernel, __builtin_cpu_supports("avx2") && has_avx_vnni()},
        {"avx2", &avx2::kernel, bool(__builtin_cpu_supports("avx2"))},
#endif
#if ARM
        {"neon-dotprod", &neon::kernel, has_dotprod()},
#endif
        {"generic", &generic::kernel, true},
    };
    return all;
}

// ------------------------------------------------------------ products

constexpr long SCRATCH = 4 << 20;  // bytes of digits at a time

struct Scratch {
    char *bytes = nullptr;
    size_t size = 0;
    ~Scratch() { free(bytes); }
    bool reserve(size_t wanted) {
        if (wanted <= size) return true;
        free(bytes);
        bytes = static_cast<char *>(malloc(wanted));
        size = bytes ? wanted : 0;
        return bytes;
    }
};
thread_local Scratch scratch;  // one per calling thread

long round_up(long n, long to) { return (n + to - 1) / to * to; }

// Calls body(activations, first row) with the digits of as many rows as scratch can hold, and the sums of their groups if
// there are groups. Returns false if there is no memory.
template <class Body>
bool with_digits(const Kernel &kernel, const float *x, const float *factor, long rows, long width, long padded, long groups,
                 int threads, const Body &body) {
    const long per_row = 2 * padded + 4 * groups + 12;
    long block = SCRATCH / per_row;
    block = block < 16 ? 16 : block > 256 ? 256 : block;
    block = rows < block ? rows : block;
    const long num_scaled = factor ? threads : 0;
    if (!scratch.reserve(block * per_row + num_scaled * width * 4 + 64)) return false;
    char *const start = scratch.bytes;
    float *const scaled = (float *)(start + round_up(block * per_row, 16));
    for (long row = 0; row < rows; row += block) {
        const long count = rows - row < block ? rows - row : block;
        int32_t *const sums = (int32_t *)start;
        float *const units = (float *)(sums + 2 * block);
        int32_t *const group_sums = (int32_t *)(units + block);
        int8_t *const digits = (int8_t *)(group_sums + block * groups);
        std::atomic<long> user{0};
        over(count, count > 8 ? count * padded * 16 : 0, threads, [&](long first, long last) {
            int8_t *const here = digits + first * 2 * padded;
            kernel.make_digits(x + (row + first) * width, factor, last - first, width, padded, here, sums + 2 * first,
                               units + first, scaled + (factor ? user++ * width : 0));
            if (groups) kernel.add_up_groups(here, last - first, padded, group_sums + first * groups);
        });
        body(Activations{count, padded, digits, sums, units, group_sums}, row);
    }
    return true;
}

const Kernel *kernel_of(int isa) {
    return isa >= 0 && isa < (int)choices().size() && choices()[isa].runs_here ? choices()[isa].kernel : nullptr;
}

int multiply(const Kernel &kernel, decltype(Kernel::times_strips) times_strips, const float *x, long rows, long in, long padded,
             long groups, int count, const uint8_t *const *packed, const float *const *scales, float *const *ys,
             const long *outs, int threads) {
    return with_digits(kernel, x, nullptr, rows, in, padded, groups, threads, [&](const Activations &digits, long row) {
        long strips = 0;
        for (int i = 0; i < count; i++) strips += round_up(outs[i], STRIP) / STRIP;
        over(strips, strips * STRIP * padded * digits.rows, threads, [&](long first, long last) {
            for (int i = 0; i < count && last > 0; i++) {
                const long here = round_up(outs[i], STRIP) / STRIP;
                if (first < here)
                    times_strips(digits, {outs[i], in, packed[i], scales ? scales[i] : nullptr}, ys[i] + row * outs[i],
                                 first > 0 ? first : 0, last < here ? last : here);
                first -= here;
                last -= here;
            }
        });
    }) ? 0 : -1;
}

}  // namespace

// ------------------------------------------------------------ functions for Python

// Returns the name of the instruction set with this number, best first; null after the last.
EXPORT const char *swarm_isa_name(int isa) { return isa < (int)choices().size() ? choices()[isa].name : nullptr; }
EXPORT int swarm_isa_runs_here(int isa) { return kernel_of(isa) != nullptr; }
EXPORT void swarm_use_openmp(void *gomp_parallel) { parallel = (Parallel)gomp_parallel; }

// Packs q: [out][in] -> packed: round_up(out, 64) * round_up(in, 4) bytes
EXPORT void swarm_pack(const int8_t *q, long out, long in, uint8_t *packed, int threads) {
    const long width4 = round_up(in, 4);
    over(round_up(out, STRIP) / STRIP, out * in, threads, [&](long first, long last) {
        for (long strip = first; strip < last; strip++) {
            uint8_t *to = packed + strip * STRIP * width4;
            if (width4 != in || (strip + 1) * STRIP > out) memset(to, 128, STRIP * width4);
            for (long c = 0; c < STRIP && strip * STRIP + c < out; c++) {
                const int8_t *row = q + (strip * STRIP + c) * in;
                uint8_t *column = to + c * 4;
                long i = 0;
                for (; i + 4 <= in; i += 4, column += STRIP * 4) {
                    uint32_t four;
                    memcpy(&four, row + i, 4);
                    four ^= 0x80808080u;
                    memcpy(column, &four, 4);
                }
                for (; i < in; i++) column[i % 4] = (uint8_t)(row[i] ^ 0x80);
            }
        }
    });
}

// Unpacks output channels first to last -> q: [last - first][in]
EXPORT void swarm_unpack(const uint8_t *packed, long in, long first, long last, int8_t *q) {
    const long width4 = round_up(in, 4);
    for (long c = first; c < last; c++, q += in) {
        const uint8_t *from = packed + c / STRIP * STRIP * width4 + c % STRIP * 4;
        for (long i = 0; i < in; i++) q[i] = (int8_t)(from[i / 4 * STRIP * 4 + i % 4] ^ 0x80);
    }
}

// Multiplies x: [rows][in] by `count` weights -> ys[i]: [rows][outs[i]]. Returns 0, or -1: no memory, or no such kernel.
EXPORT int swarm_matmul(const float *x, long rows, long in, int count, const uint8_t *const *packed,
                        const float *const *scales, float *const *ys, const long *outs, int isa, int threads) {
    const Kernel *kernel = kernel_of(isa);
    return kernel ? multiply(*kernel, kernel->times_strips, x, rows, in, round_up(in, 4), 0, count, packed, scales, ys, outs,
                             threads)
                  : -1;
}

// Like swarm_matmul, with int4 weights
EXPORT int swarm_matmul4(const float *x, long rows, long in, int count, const uint8_t *const *packed, float *const *ys,
                         const long *outs, int isa, int threads) {
    const Kernel *kernel = kernel_of(isa);
    const long groups = round_up(in, GROUP) / GROUP;
    return kernel ? multiply(*kernel, kernel->times_strips4, x, rows, in, groups * GROUP, groups, count, packed, nullptr, ys,
                             outs, threads)
                  : -1;
}

// Maps grad: [rows][out] -> y: [rows][in] = (grad * scale) @ q. Returns 0, or -1: no memory, or no such kernel.
EXPORT int swarm_matmul_transposed(const float *grad, long rows, long out, long in, const uint8_t *packed,
                                   const float *scale, float *y, int isa, int threads) {
    const Kernel *kernel = kernel_of(isa);
    if (!kernel) return -1;
    const long padded = round_up(out, STRIP), strips = round_up(in, STRIP) / STRIP;
    return with_digits(*kernel, grad, scale, rows, out, padded, 0, threads, [&](const Activations &digits, long row) {
        over(strips, strips * STRIP * padded * digits.rows, threads, [&](long first, long last) {
            kernel->times_columns(digits, {out, in, packed, scale}, y + row * in, first, last);
        });
    }) ? 0 : -1;
}

// Packs int4: q, [out][in] from 0 to 15, and descriptions, [out][in / 32] (see nibbles.h) -> packed
EXPORT void swarm_pack4(const uint8_t *q, const uint16_t *descriptions, long out, long in, uint8_t *packed, int threads) {
    const long groups = round_up(in, GROUP) / GROUP;
    over(round_up(out, STRIP) / STRIP, out * in, threads, [&](long first, long last) {
        memset(packed + first * groups * GROUP_BYTES, 0, (last - first) * groups * GROUP_BYTES);
        for (long c = first * STRIP; c < last * STRIP && c < out; c++) {
            uint8_t *group = packed + c / STRIP * groups * GROUP_BYTES;
            for (long g = 0; g < groups; g++, group += GROUP_BYTES) {
                memcpy(group + c % STRIP * 2, descriptions + c * groups + g, 2);
                uint8_t *bytes = group + 2 * STRIP + c % STRIP * 4;
                const long left = in - g * GROUP, width = left < GROUP ? left : GROUP;
                for (long i = 0; i < width; i++)
                    bytes[i / 8 * STRIP * 4 + i % 4] |= (uint8_t)(q[c * in + g * GROUP + i] << (i & 4));
            }
        }
    });
}

// Unpacks int4 output channels first to last -> weight: [last - first][in]
EXPORT void swarm_unpack4(const uint8_t *packed, long in, long first, long last, float *weight, int threads) {
    const long groups = round_up(in, GROUP) / GROUP;
    over(last - first, (last - first) * in, threads, [&](long start, long stop) {
        for (long c = first + start; c < first + stop; c++) {
            const uint8_t *group = packed + c / STRIP * groups * GROUP_BYTES;
            float *to = weight + (c - first) * in;
            for (long g = 0; g < groups; g++, group += GROUP_BYTES, to += GROUP) {
                uint16_t description;
                memcpy(&description, group + c % STRIP * 2, 2);
                const uint32_t bits = (uint32_t)(description & 0xfff0) << 15;
                float scale;
                memcpy(&scale, &bits, 4);
                const uint8_t *bytes = group + 2 * STRIP + c % STRIP * 4;
                const long left = in - g * GROUP, width = left < GROUP ? left : GROUP;
                for (long i = 0; i < width; i++)
                    to[i] = (float)((bytes[i / 8 * STRIP * 4 + i % 4] >> (i & 4) & 15) - (description & 15)) * scale;
            }
        }
    });
}
