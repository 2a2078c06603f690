// Operations on strided fp32 tensors of up to four dimensions, for one instruction set: program.cpp includes this file once
// for each, inside a namespace in which the compiler may use that set. A row's result does not depend on the row count:
// every element, and every sum, is computed in a fixed order.

// exp(x) within 2 units in the last place, in a form that compilers turn into vector code. Saturates instead of overflowing.
ALWAYS_INLINE float fast_exp(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;  // NaN stays
    const float magic = 12582912.0f;                   // 1.5 * 2**23
    const float shifted = x * 1.44269504f + magic;
    const float n = shifted - magic;
    float r = x - n * 0.693359375f;  // ln 2 in two parts, the first exact with n (Cody and Waite)
    r = r - n * -2.12194440e-4f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    int32_t bits;
    memcpy(&bits, &shifted, 4);
    bits = (bits - 0x4b400000 + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

ALWAYS_INLINE float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

ALWAYS_INLINE float gelu_tanh(float x) {  // 0.5 x (1 + tanh(z)) = x sigmoid(2 z); Hendrycks and Gimpel, 2016
    return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
}

// Calls body(out, a, b) for each innermost row
template <class Body> ALWAYS_INLINE void rows_of(const Instruction &op, const Body &body) {
    for (long i = 0; i < op.sizes[0]; i++)
        for (long j = 0; j < op.sizes[1]; j++)
            for (long k = 0; k < op.sizes[2]; k++)
                body(op.out.at(i, j, k), op.a.at(i, j, k), op.b.at(i, j, k));
}

template <class F> static void unary(const Instruction &op, const F &f) {
    const long n = op.sizes[3], so = op.out.strides[3], sa = op.a.strides[3];
    rows_of(op, [&](float *out, const float *a, const float *) INLINE {
        if (so == 1 && sa == 1)
            for (long i = 0; i < n; i++) out[i] = f(a[i]);
        else
            for (long i = 0; i < n; i++) out[i * so] = f(a[i * sa]);
    });
}

template <class F> static void binary(const Instruction &op, const F &f) {
    const long n = op.sizes[3], so = op.out.strides[3], sa = op.a.strides[3], sb = op.b.strides[3];
    rows_of(op, [&](float *out, const float *a, const float *b) INLINE {
        if (so == 1 && sa == 1 && sb == 1) {
            for (long i = 0; i < n; i++) out[i] = f(a[i], b[i]);
        } else if (so == 1 && sa == 1 && sb == 0) {
            const float right = *b;
            for (long i = 0; i < n; i++) out[i] = f(a[i], right);
        } else if (so == 1 && sa == 0 && sb == 1) {
            const float left = *a;
            for (long i = 0; i < n; i++) out[i] = f(left, b[i]);
        } else {
            for (long i = 0; i < n; i++) out[i * so] = f(a[i * sa], b[i * sb]);
        }
    });
}

// Sixteen partial sums, added at the end
template <class F> ALWAYS_INLINE float sum_of(const float *a, long n, long stride, const F &f) {
    float parts[16] = {};
    long i = 0;
    if (stride == 1)
        for (; i + 16 <= n; i += 16)
            for (int lane = 0; lane < 16; lane++) parts[lane] += f(a[i + lane]);
    for (; i < n; i++) parts[i % 16] += f(a[i * stride]);
    float total = 0;
    for (float part : parts) total += part;
    return total;
}

static void mean(const Instruction &op) {  // over the innermost dimension of a
    const long n = op.sizes[3];
    rows_of(op, [&](float *out, const float *a, const float *) INLINE {
        *out = sum_of(a, n, op.a.strides[3], [](float x) INLINE { return x; }) / (float)n;
    });
}

static void layer_norm(const Instruction &op) {  // Ba et al., 2016; b: weight, c: bias, both or either may be missing
    const long n = op.sizes[3];
    const float *weight = op.b.address, *bias = op.c.address;
    for (long i = 0; i < op.sizes[0]; i++)
        for (long j = 0; j < op.sizes[1]; j++)
            for (long k = 0; k < op.sizes[2]; k++) {
                float *out = op.out.at(i, j, k);
                const float *a = op.a.at(i, j, k);
                const float mean = sum_of(a, n, 1, [](float x) INLINE { return x; }) / (float)n;
                const float variance = sum_of(a, n, 1, [&](float x) INLINE { return (x - mean) * (x - mean); }) / (float)n;
                const float factor = 1.0f / std::sqrt(variance + (float)op.scalar);
                for (long l = 0; l < n; l++) out[l] = (a[l] - mean) * factor;
                if (weight)
                    for (long l = 0; l < n; l++) out[l] *= weight[l];
                if (bias)
                    for (long l = 0; l < n; l++) out[l] += bias[l];
            }
}

static void from_int64(const Instruction &op) {
    const long n = op.sizes[3], so = op.out.strides[3], sa = op.a.strides[3];
    for (long i = 0; i < op.sizes[0]; i++)
        for (long j = 0; j < op.sizes[1]; j++)
            for (long k = 0; k < op.sizes[2]; k++) {
                const int64_t *a = (const int64_t *)op.a.address + i * op.a.strides[0] + j * op.a.strides[1] + k * op.a.strides[2];
                float *out = op.out.at(i, j, k);
                for (long l = 0; l < n; l++) out[l * so] = (float)a[l * sa];
            }
}

// ``width`` columns of out, [rows][out], as sums over k in order
template <long width> static void columns(const Instruction &op, long first) {
    const long rows = op.sizes[0], in = op.sizes[1], step = op.b.strides[0];
    for (long i = 0; i < rows; i++) {
        const float *a = op.a.at(i, 0, 0), *b = op.b.address + first;
        float sums[width] = {};
        for (long k = 0; k < in; k++, b += step)
            for (long l = 0; l < width; l++) sums[l] += a[k] * b[l];
        memcpy(op.out.at(i, 0, 0) + first, sums, sizeof sums);
    }
}

static void matrix_product(const Instruction &op) {
    const long outs = op.sizes[2];
    long first = 0;
    for (; first + 64 <= outs; first += 64) columns<64>(op, first);
    for (; first + 16 <= outs; first += 16) columns<16>(op, first);
    for (; first < outs; first++) columns<1>(op, first);
}

static void compute(const Instruction &op) {
    switch (op.kind) {
    case COPY: return unary(op, [](float x) INLINE { return x; });
    case NEG: return unary(op, [](float x) INLINE { return -x; });
    case RSQRT: return unary(op, [](float x) INLINE { return 1.0f / std::sqrt(x); });
    case SILU: return unary(op, [](float x) INLINE { return x * sigmoid(x); });
    case SIGMOID: return unary(op, [](float x) INLINE { return sigmoid(x); });
    case TANH: return unary(op, [](float x) INLINE { return std::tanh(x); });
    case RELU: return unary(op, [](float x) INLINE { return x < 0 ? 0 : x; });
    case GELU: return unary(op, [](float x) INLINE { return 0.5f * x * (1.0f + std::erf(x * 0.70710678f)); });
    case GELU_TANH: return unary(op, [](float x) INLINE { return gelu_tanh(x); });
    case COS: return unary(op, [](float x) INLINE { return std::cos(x); });
    case SIN: return unary(op, [](float x) INLINE { return std::sin(x); });
    case SQUARE: return unary(op, [](float x) INLINE { return x * x; });
    case CUBE: return unary(op, [](float x) INLINE { return x * x * x; });
    case ADD: return binary(op, [](float x, float y) INLINE { return x + y; });
    case SUB: return binary(op, [](float x, float y) INLINE { return x - y; });
    case MUL: return binary(op, [](float x, float y) INLINE { return x * y; });
    case DIV: return binary(op, [](float x, float y) INLINE { return x / y; });
    case MEAN: return mean(op);
    case LAYER_NORM: return layer_norm(op);
    case MATRIX_PRODUCT: return matrix_product(op);
    case FROM_INT64: return from_int64(op);
    }
}
