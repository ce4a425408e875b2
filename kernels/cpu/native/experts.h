// The routed experts and their sum. Included by an ISA unit inside its own anonymous namespace.

// gelu by its tanh formula, x * (1 + tanh(u)) / 2 = x / (1 + e^-2u)
inline V gelu_lanes(V x) {
    V cube = mul(mul(mul(set1(0.044715f), x), x), x);
    V u = mul(set1(0.7978845608028654f), add(x, cube));
    return div(x, add(set1(1.0f), exp_lanes(mul(set1(-2.0f), u))));
}

// What one lane of gate and up becomes. A nan stays one: max and min give their second argument then.
template <int KIND>
inline V activate_lanes(V gate, V up, V alpha, V limit) {
    if constexpr (KIND == RELU) return max(zero(), up);
    if constexpr (KIND == SWIGLU) return mul(silu_lanes(gate), up);
    if constexpr (KIND == GEGLU_TANH) return mul(gelu_lanes(gate), up);
    gate = min(limit, gate);
    up = max(sub(zero(), limit), min(limit, up));
    V glu = div(gate, add(set1(1.0f), exp_lanes(sub(zero(), mul(alpha, gate)))));
    return mul(add(up, set1(1.0f)), glu);
}

// Columns [from, to) of a row of inner in place of the first part (gate, or up where there is no gate). Whole panels, so no
// tail; the second part begins at `padded`.
template <int KIND>
inline void activate(const Expert& expert, float* row, int64_t padded, int64_t from, int64_t to) {
    const float* bias = expert.inner_bias;
    const float* up_row = row + (KIND == RELU ? 0 : padded);
    const float* up_bias = bias + (KIND == RELU ? 0 : padded);
    const V alpha = set1(expert.alpha), limit = set1(expert.limit);
    for (int64_t f = from; f < to; f += 16) {
        V gate = load(row + f), up = load(up_row + f);
        if (bias) {
            gate = add(gate, load(bias + f));
            up = add(up, load(up_bias + f));
        }
        store(row + f, activate_lanes<KIND>(gate, up, alpha, limit));
    }
}

inline int64_t padded_width(const Expert& expert) {
    return expert.activation == RELU ? expert.gate_up.num_outputs : expert.gate_up.num_outputs / 2;
}

void activate_row(const Expert& expert, float* row, int64_t from, int64_t to) {
    const int64_t padded = padded_width(expert);
    switch (expert.activation) {
        case SWIGLU: activate<SWIGLU>(expert, row, padded, from, to); break;
        case GEGLU_TANH: activate<GEGLU_TANH>(expert, row, padded, from, to); break;
        case CLAMPED_SWIGLU: activate<CLAMPED_SWIGLU>(expert, row, padded, from, to); break;
        case RELU: activate<RELU>(expert, row, padded, from, to); break;
    }
}

void activate_rows(const Expert& expert, float* inner, int64_t rows, int64_t wide) {
    for (int64_t i = 0; i < rows; ++i) activate_row(expert, inner + i * wide, 0, padded_width(expert));
}

// Outputs [16 first, 16 end) of a weight: whole panels.
inline Panels panel_range(const Panels& w, int64_t first, int64_t end) {
    Panels view = w;
    view.data += first * w.panel_bytes;
    view.num_outputs = 16 * (end - first);
    return view;
}

// Inputs that a view of a weight can begin and end at.
inline int64_t input_step(int format) { return format == Q4 ? 2 * GROUP : format == MXFP4 ? 4 * GROUP : format == Q8 ? 4 : 2; }

// Inputs [first, end) of a weight, both multiples of input_step or the end of them all.
inline Panels input_range(const Panels& w, int64_t first, int64_t end) {
    Panels view = w;
    view.num_inputs = end - first;
    switch (w.format) {
        case F32: view.data += first * 64; break;
        case Q8: view.skip += first * 16; break;
        case Q4: view.data += first / (2 * GROUP) * (64 + 2 * GROUP_BYTES); break;
        case MXFP4: view.data += first / (4 * GROUP) * (64 + 4 * GROUP_BYTES); break;
        default: view.data += first * 32; break;
    }
    return view;
}

constexpr int64_t MOST_ROWS = 48;  // of one expert at a time: gate_up of 48 rows stays in cache

// Rows that want some slices of an expert: a slice's neurons for the rows that want it, and their sums with `down`.
void sliced_rows(const Expert& expert, const ExpertCall& call, int64_t first, int64_t n) {
    const int64_t wide = expert.gate_up.num_outputs, padded = padded_width(expert), F = expert.down.num_inputs;
    const int64_t width = F / call.parts, step = input_step(expert.down.format), D = expert.down.num_outputs;
    const int64_t spread = parts_of(width, step) * step + step;  // inputs that a slice may touch
    float* inner = (float*)scratch(INNER, (size_t)(n * (wide + spread)) * sizeof(float));
    float* aligned = inner + n * wide;
    const int32_t* masks = call.masks + first;
    const auto wanted = [&](int64_t s, int64_t i) { return (masks[i] >> s & 1) != 0; };
    const float* xs[MOST_ROWS];
    float *rows[MOST_ROWS], *ups[MOST_ROWS], *outs[MOST_ROWS];
    for (int64_t i = 0; i < n; ++i)
        __builtin_memset(call.out + call.out_rows[first + i] * call.out_stride, 0, (size_t)D * sizeof(float));
    for (int64_t s = 0; s < call.parts; ++s) {
        int64_t end = s + 1, m = 0;  // slices that the same rows want are one range of neurons
        const auto alike = [&](int64_t other) {
            for (int64_t i = 0; i < n; ++i)
                if (wanted(s, i) != wanted(other, i)) return false;
            return true;
        };
        while (end < call.parts && alike(end)) ++end;
        const int64_t p0 = s * width / 16, p1 = parts_of(end * width, 16);
        for (int64_t i = 0; i < n; ++i) {
            if (!wanted(s, i)) continue;
            xs[m] = call.x + call.rows[first + i] * call.x_stride;
            rows[m] = inner + i * wide + 16 * p0;
            ups[m] = rows[m] + padded;
            outs[m++] = call.out + call.out_rows[first + i] * call.out_stride;
        }
        if (m > 0) {
            rows_by_pointer(panel_range(expert.gate_up, p0, p1), xs, rows, m, false, nullptr);
            if (expert.activation != RELU)
                rows_by_pointer(panel_range(expert.gate_up, padded / 16 + p0, padded / 16 + p1), xs, ups, m, false, nullptr);
            for (int64_t i = 0; i < m; ++i) {
                rows[i] -= 16 * p0;
                activate_row(expert, rows[i], 16 * p0, 16 * p1);
            }
            for (int64_t each = s; each < end; ++each) {
                const int64_t a = each * width, b = a + width, from = a / step * step;
                const int64_t to = at_most(parts_of(b, step) * step, F);
                for (int64_t i = 0; i < m; ++i) {
                    xs[i] = rows[i] + a;
                    if (from == a && to == b) continue;
                    float* whole = aligned + i * spread;  // neurons beside the slice count nothing
                    __builtin_memset(whole, 0, (size_t)spread * sizeof(float));
                    __builtin_memcpy(whole + (a - from), rows[i] + a, (size_t)width * sizeof(float));
                    xs[i] = whole;
                }
                rows_by_pointer(input_range(expert.down, from, to), xs, outs, m, true, nullptr);
            }
        }
        s = end - 1;
    }
    if (!expert.down_bias) return;
    for (int64_t i = 0; i < n; ++i) {
        float* out = call.out + call.out_rows[first + i] * call.out_stride;
        const float share = (float)__builtin_popcount((unsigned)masks[i]) / (float)call.parts;
        for (int64_t d = 0; d < D; ++d) out[d] = out[d] + expert.down_bias[d] * share;
    }
}

void expert_inner(const ExpertCall& call) {
    for (int64_t g = 0; g < call.groups; ++g) {
        const Expert& expert = *call.experts[g];
        const int64_t wide = expert.gate_up.num_outputs, F = expert.down.num_inputs;
        for (int64_t r = call.offsets[g]; r < call.offsets[g + 1]; r += MOST_ROWS) {
            const int64_t n = at_most(MOST_ROWS, call.offsets[g + 1] - r);
            float* inner = (float*)scratch(INNER, (size_t)(n * wide) * sizeof(float));
            const float* xs[MOST_ROWS];
            float* hs[MOST_ROWS];
            for (int64_t i = 0; i < n; ++i) {
                xs[i] = call.x + call.rows[r + i] * call.x_stride;
                hs[i] = inner + i * wide;
            }
            rows_by_pointer(expert.gate_up, xs, hs, n, false, nullptr);
            activate_rows(expert, inner, n, wide);
            for (int64_t i = 0; i < n; ++i)
                __builtin_memcpy(call.out + call.out_rows[r + i] * call.out_stride, hs[i], (size_t)F * sizeof(float));
        }
    }
}

void grouped_ffn(const ExpertCall& call) {
    constexpr int64_t MOST = MOST_ROWS;
    for (int64_t g = 0; g < call.groups; ++g) {
        const Expert& expert = *call.experts[g];
        const int64_t wide = expert.gate_up.num_outputs;
        const char* next = g + 1 < call.groups ? call.experts[g + 1]->gate_up.data : nullptr;
        for (int64_t r = call.offsets[g]; r < call.offsets[g + 1]; r += MOST) {
            const int64_t n = at_most(MOST, call.offsets[g + 1] - r);
            if (call.masks && call.masks[r] != (1 << call.parts) - 1) {
                sliced_rows(expert, call, r, n);
                continue;
            }
            float* inner = (float*)scratch(INNER, (size_t)(n * wide) * sizeof(float));
            const float* xs[MOST];
            float* hs[MOST];
            float* outs[MOST];
            for (int64_t i = 0; i < n; ++i) {
                xs[i] = call.x + call.rows[r + i] * call.x_stride;
                hs[i] = inner + i * wide;
                outs[i] = call.out + call.out_rows[r + i] * call.out_stride;
            }
            rows_by_pointer(expert.gate_up, xs, hs, n, false, expert.down.data);
            activate_rows(expert, inner, n, wide);
            rows_by_pointer(expert.down, (const float* const*)hs, outs, n, false, next);
            if (expert.down_bias)
                for (int64_t i = 0; i < n; ++i) add_row(outs[i], expert.down_bias, expert.down.num_outputs);
        }
    }
}

void combine(const float* rows, int64_t stride, const int32_t* slots, const float* weights, int64_t T, int64_t K,
             int64_t D, float* hidden, int64_t hidden_stride) {
    for (int64_t t = 0; t < T; ++t) {
        const int32_t* slot = slots + t * K;
        const float* weight = weights + t * K;
        float* to = hidden + t * hidden_stride;
        for (int64_t d = 0; d < D; d += 16) {
            const int lanes = (int)at_most(16, D - d);
            V sum = zero();
            for (int64_t j = 0; j < K; ++j) {
                if (slot[j] < 0) continue;  // the row is skipped, not weighted with 0: it may hold inf
                const float* row = rows + slot[j] * stride + d;
                sum = fma(set1(weight[j]), lanes == 16 ? load(row) : load_part(row, lanes), sum);
            }
            if (lanes == 16)
                store(to + d, add(load(to + d), sum));
            else
                store_part(to + d, add(load_part(to + d, lanes), sum), lanes);
        }
    }
}
