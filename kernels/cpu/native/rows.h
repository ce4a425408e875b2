// Work on single rows: rms_norm, head norm and rope. Included by an ISA unit inside its own anonymous namespace.

inline V load_lanes(const float* p, int64_t lanes) { return lanes >= 16 ? load(p) : load_part(p, (int)lanes); }
inline void store_lanes(float* p, V v, int64_t lanes) {
    if (lanes >= 16)
        store(p, v);
    else
        store_part(p, v, (int)lanes);
}

// to[0..n) += from[0..n)
inline void add_row(float* to, const float* from, int64_t n) {
    for (int64_t i = 0; i < n; i += 16)
        store_lanes(to + i, add(load_lanes(to + i, n - i), load_lanes(from + i, n - i)), n - i);
}

// 1 / sqrt(mean of squares + eps): 16 partial sums along the row, then the fixed tree.
inline float inverse_rms(const float* x, int64_t D, float eps) {
    V squares = zero();
    for (int64_t d = 0; d < D; d += 16) {
        V v = load_lanes(x + d, D - d);
        squares = fma(v, v, squares);
    }
    return 1.0f / __builtin_sqrtf(lane_sum(squares) / (float)D + eps);
}

void rms_norm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t T, int64_t D, float* out,
              int64_t out_stride) {
    for (int64_t t = 0; t < T; ++t) {
        const float* from = x + t * x_stride;
        float* to = out + t * out_stride;
        const V scale = set1(inverse_rms(from, D, eps));
        for (int64_t d = 0; d < D; d += 16)
            store_lanes(to + d, mul(mul(load_lanes(from + d, D - d), scale), load_lanes(weight + d, D - d)), D - d);
    }
}

void head_norm_rope(float* x, int64_t token_stride, int64_t head_stride, int64_t T, int64_t H, int64_t P,
                    const float* weight, float eps, const float* cos, const float* sin, const int32_t* positions) {
    const int64_t half = P / 2;
    for (int64_t t = 0; t < T; ++t) {
        const float* c = cos + positions[t] * half;
        const float* s = sin + positions[t] * half;
        for (int64_t h = 0; h < H; ++h) {
            float* row = x + t * token_stride + h * head_stride;
            const V scale = set1(weight ? inverse_rms(row, P, eps) : 1.0f);
            for (int64_t p = 0; p < half; p += 16) {
                const int64_t lanes = half - p;
                V a = load_lanes(row + p, lanes), b = load_lanes(row + half + p, lanes);
                if (weight) {
                    a = mul(mul(a, scale), load_lanes(weight + p, lanes));
                    b = mul(mul(b, scale), load_lanes(weight + half + p, lanes));
                }
                const V cp = load_lanes(c + p, lanes), sp = load_lanes(s + p, lanes);
                store_lanes(row + p, sub(mul(a, cp), mul(b, sp)), lanes);
                store_lanes(row + half + p, add(mul(b, cp), mul(a, sp)), lanes);
            }
        }
    }
}

void exp_row(const float* x, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i += 16) store_lanes(out + i, exp_lanes(load_lanes(x + i, n - i)), n - i);
}

// 32 vector multiply-adds a turn in 8 independent chains: the most this core can do.
float fma_turns(int64_t turns) {
    V acc[8], a = set1(0.999f), b = set1(1e-3f);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) acc[i] = set1((float)i);
    for (int64_t turn = 0; turn < turns; ++turn)
#pragma GCC unroll 4
        for (int repeat = 0; repeat < 4; ++repeat)
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) acc[i] = fma(acc[i], a, b);
    V total = zero();
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) total = add(total, acc[i]);
    return lane_sum(total);
}
