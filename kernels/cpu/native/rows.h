// Work on single rows: rms_norm, head norm and rope. Included by an ISA unit inside its own anonymous namespace.

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

// to = from * scale * weight; weight may be null
inline void scale_row(const float* from, V scale, const float* weight, int64_t D, float* to) {
    if (weight)
        for (int64_t d = 0; d < D; d += 16)
            store_lanes(to + d, mul(mul(load_lanes(from + d, D - d), scale), load_lanes(weight + d, D - d)), D - d);
    else
        for (int64_t d = 0; d < D; d += 16) store_lanes(to + d, mul(load_lanes(from + d, D - d), scale), D - d);
}

void rms_norm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t T, int64_t D, float* out,
              int64_t out_stride) {
    for (int64_t t = 0; t < T; ++t) {
        const float* from = x + t * x_stride;
        scale_row(from, set1(inverse_rms(from, D, eps)), weight, D, out + t * out_stride);
    }
}

// Pairs (p, p + C) of a head turned by the angles of one position.
inline void turn_halves(float* row, const float* c, const float* s, int64_t C) {
    for (int64_t p = 0; p < C; p += 16) {
        const int64_t lanes = C - p;
        const V a = load_lanes(row + p, lanes), b = load_lanes(row + C + p, lanes);
        const V cp = load_lanes(c + p, lanes), sp = load_lanes(s + p, lanes);
        store_lanes(row + p, sub(mul(a, cp), mul(b, sp)), lanes);
        store_lanes(row + C + p, add(mul(b, cp), mul(a, sp)), lanes);
    }
}

// Pairs (2p, 2p + 1): the same operations on single values.
inline void turn_neighbours(float* row, const float* c, const float* s, int64_t C) {
    for (int64_t p = 0; p < C; ++p) {
        const float a = row[2 * p], b = row[2 * p + 1];
        row[2 * p] = a * c[p] - b * s[p];
        row[2 * p + 1] = b * c[p] + a * s[p];
    }
}

void head_norm_rope(float* x, int64_t token_stride, int64_t head_stride, int64_t T, int64_t H, int64_t P,
                    const float* weight, float eps, const float* cos, const float* sin, int64_t C, bool interleaved,
                    const int32_t* positions) {
    for (int64_t t = 0; t < T; ++t) {
        const float* c = cos + positions[t] * C;
        const float* s = sin + positions[t] * C;
        for (int64_t h = 0; h < H; ++h) {
            float* row = x + t * token_stride + h * head_stride;
            if (weight) scale_row(row, set1(inverse_rms(row, P, eps)), weight, P, row);
            if (interleaved)
                turn_neighbours(row, c, s, C);
            else
                turn_halves(row, c, s, C);
        }
    }
}

// x W^T + bias as one sum, which is then written or added.
void linear_with_bias(const Panels& w, const float* x, int64_t x_stride, int64_t T, const float* bias, float* out,
                      int64_t out_stride, bool add_to_out) {
    const int64_t N = w.num_outputs;
    if (!bias || !add_to_out) {
        linear(w, x, x_stride, T, out, out_stride, add_to_out);
        if (bias)
            for (int64_t t = 0; t < T; ++t) add_row(out + t * out_stride, bias, N);
        return;
    }
    constexpr int64_t MOST = 128;  // rows at a time: the weight is read again for each
    float* sums = (float*)scratch(SMALL, (size_t)(at_most(T, MOST) * N) * sizeof(float));
    for (int64_t t = 0; t < T; t += MOST) {
        const int64_t n = at_most(MOST, T - t);
        linear(w, x + t * x_stride, x_stride, n, sums, N, false);
        for (int64_t i = 0; i < n; ++i) {
            add_row(sums + i * N, bias, N);
            add_row(out + (t + i) * out_stride, sums + i * N, N);
        }
    }
}

// yes where x < low, else no; both finite, or x nan
inline V choose_below(V x, V low, V yes, V no) { return add(zero_below(no, x, low), sub(yes, zero_below(yes, x, low))); }

// At most 2 ulp off. Near 0 x + x^3 p(x^2), p fitted by us; beyond 1 - 2 / (e^2|x| + 1), with the sign of x.
inline V tanh_lanes(V x) {
    const V near = set1(0.625f);
    V r = max(set1(-0.625f), min(near, x));
    V square = mul(r, r);
    V p = set1(-0.005704523995518684f);
    p = fma(p, square, set1(0.020638689398765564f));
    p = fma(p, square, set1(-0.053739599883556366f));
    p = fma(p, square, set1(0.13331441581249237f));
    p = fma(p, square, set1(-0.3333328068256378f));
    V small = fma(mul(p, square), r, r);
    V size = max(sub(zero(), x), x);
    V large = sub(set1(1.0f), div(set1(2.0f), add(exp_lanes(add(size, size)), set1(1.0f))));
    large = choose_below(x, zero(), sub(zero(), large), large);
    return choose_below(size, near, small, large);
}

void soft_cap(float* x, int64_t stride, int64_t T, int64_t N, float cap) {
    const V c = set1(cap);
    for (int64_t t = 0; t < T; ++t)
        for (int64_t i = 0; i < N; i += 16) {
            float* at = x + t * stride + i;
            store_lanes(at, mul(c, tanh_lanes(div(load_lanes(at, N - i), c))), N - i);
        }
}

void exp_row(const float* x, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i += 16) store_lanes(out + i, exp_lanes(load_lanes(x + i, n - i)), n - i);
}

void tanh_row(const float* x, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i += 16) store_lanes(out + i, tanh_lanes(load_lanes(x + i, n - i)), n - i);
}

bool finite(const float* x, int64_t stride, int64_t T, int64_t N) {
    V sum = zero();  // a - a is 0, or nan for nan and inf
    for (int64_t t = 0; t < T; ++t)
        for (int64_t i = 0; i < N; i += 16) {
            const V v = load_lanes(x + t * stride + i, N - i);
            sum = add(sum, sub(v, v));
        }
    return lane_sum(sum) == 0.0f;
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
