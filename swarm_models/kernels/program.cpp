// Runs a list of instructions on fp32 tensors: a decode step of several blocks in one call, without an interpreter between
// two products. Instructions name memory by its address; the code that writes the list (swarm_server/graph) guarantees that
// all of this memory is valid.
//
// Needs a C++17 compiler and nothing else; called from Python through the function at the end of this file.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "exported.h"
#include "group.h"
#include "platform.h"

namespace {

// In the order of `Opcode` in program.py
enum Opcode : int64_t {
    COPY, NEG, RSQRT, SILU, SIGMOID, TANH, RELU, GELU, GELU_TANH, COS, SIN, SQUARE, CUBE, FROM_INT64,
    ADD, SUB, MUL, DIV, MEAN, LAYER_NORM, MATRIX_PRODUCT, PRODUCT, ATTEND, NUM_OPCODES
};

struct Operand {
    float *address;
    int64_t strides[4];  // in elements

    float *at(long i, long j, long k) const { return address + i * strides[0] + j * strides[1] + k * strides[2]; }
};

// PRODUCT: a, [rows][in], times the packed weight b (int8: with scales c, [out]; int4: no c) -> out; sizes: rows, in, out.
// If its number is not 0, it is one more than the number of a weight of a group, of which b and c are the leader's part.
// ATTEND: query a, keys b and values c of the new position -> out, [rows][heads][value width]; strides between rows and
// heads; sizes: rows, heads, key heads, width.
// LAYER_NORM: a times b plus c; b or c may be missing.
// MATRIX_PRODUCT: a, [rows][in], times b, [in][out], both fp32 -> out; sizes: rows, in, out; neighbouring columns are
// neighbours in memory.
// Others: out = f(a) or f(a, b), element by element; sizes of out, but MEAN is over the last of a.
struct Instruction {
    int64_t kind, sizes[4];
    Operand out, a, b, c;
    double scalar;  // scaling of ATTEND, epsilon of LAYER_NORM
    int64_t number, other;  // ATTEND: the block's index; the width of its values. PRODUCT: see above; nothing
};

using Compute = void (*)(const Instruction &);

namespace generic {
#include "elementwise.h"
}  // namespace generic

#if X86
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
namespace avx2 {
#include "elementwise.h"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
#endif
namespace avx512 {
#include "elementwise.h"
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // X86

Compute best() {
#if X86
    if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"))
        return avx512::compute;
    if (__builtin_cpu_supports("avx2")) return avx2::compute;
#endif
    return generic::compute;
}

// The location of a batch's rows, as attention.cpp takes it
struct Places {
    const void *parts;
    const int64_t *firsts, *key_channels, *value_channels;
};

// Computes the products from ``op`` on that have the same inputs, all of weights of the group. Returns how many, or 0.
long products_in_group(const Instruction *op, const Instruction *end, Group &group, int isa, int threads) {
    int32_t numbers[MOST_WEIGHTS];
    const uint8_t *packed[MOST_WEIGHTS];
    const float *scales[MOST_WEIGHTS];
    float *ys[MOST_WEIGHTS];
    long outs[MOST_WEIGHTS];
    int count = 0;
    for (const Instruction *next = op; next < end && count < MOST_WEIGHTS; next++, count++) {
        if (next->kind != PRODUCT || !next->number || next->a.address != op->a.address || next->sizes[0] != op->sizes[0] ||
            next->sizes[1] != op->sizes[1] || !next->c.address != !op->c.address)
            break;
        numbers[count] = (int32_t)(next->number - 1);
        packed[count] = (const uint8_t *)next->b.address;
        scales[count] = next->c.address;
        ys[count] = next->out.address;
        outs[count] = next->sizes[2];
    }
    const SharedProduct product{op->a.address, op->sizes[0], op->sizes[1], count, numbers, packed, scales, ys, outs};
    return multiply_in_group(group, product, isa, threads) ? 0 : count;
}

}  // namespace

// How many kinds of instructions there are: another number means another version of program.py
EXPORT long swarm_num_opcodes() { return NUM_OPCODES; }

// places: one per block. group: of the weights that are split; null if there are none. Returns -1 if all instructions have
// run, else the number of the one that failed.
EXPORT long swarm_run_program(const Instruction *program, long count, const Places *places, int isa, int attention_isa,
                              int threads, Group *group) {
    static const Compute compute = best();
    for (long i = 0; i < count; i++) {
        const Instruction &op = program[i];
        if (op.kind == PRODUCT && op.number) {
            const long computed = group ? products_in_group(program + i, program + count, *group, isa, threads) : 0;
            if (!computed) return i;
            i += computed - 1;
        } else if (op.kind == PRODUCT) {
            const uint8_t *packed = (const uint8_t *)op.b.address;
            const float *scale = op.c.address;
            const long outs = op.sizes[2];
            if (scale ? swarm_matmul(op.a.address, op.sizes[0], op.sizes[1], 1, &packed, &scale, &op.out.address, &outs, isa, threads)
                      : swarm_matmul4(op.a.address, op.sizes[0], op.sizes[1], 1, &packed, &op.out.address, &outs, isa, threads))
                return i;
        } else if (op.kind == ATTEND) {
            const Places &at = places[op.number];
            if (swarm_store(at.parts, at.firsts, op.sizes[0], at.key_channels, at.value_channels, op.b.address,
                            op.b.strides[0], op.b.strides[1], op.c.address, op.c.strides[0], op.c.strides[1], op.sizes[2],
                            op.sizes[3], op.other) ||
                swarm_attend(at.parts, at.firsts, op.sizes[0], at.key_channels, at.value_channels, op.a.address,
                             op.a.strides[0], op.a.strides[1], op.sizes[1], op.sizes[3], op.other, (float)op.scalar, op.out.address,
                             attention_isa, threads))
                return i;
        } else {
            compute(op);
        }
    }
    return -1;
}
