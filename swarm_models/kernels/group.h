// Products whose weights are split by outputs over the members of a group.
#pragma once

#include <cstdint>

constexpr int MOST_WEIGHTS = 8;  // of one product

// The members of a group, as its leader sees them
struct Group;

// Weights of a group: those that the leader multiplies with the same inputs. The outputs are [rows][outs].
struct SharedProduct {
    const float *x;
    long rows, in;
    int count;
    const int32_t *numbers;  // of the weights
    const uint8_t *const *packed;  // the leader's own outputs of each weight
    const float *const *scales;  // int4: null
    float *const *ys;
    const long *outs;  // of the whole weights
};

// Computes the product in all members. Returns 0, or another number if a member or memory is missing.
int multiply_in_group(Group &group, const SharedProduct &product, int isa, int threads);
