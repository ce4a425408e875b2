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

// Neurons [first, first + count) of an expert, whole panels: `to` from what gate and up gave. There is no gate with RELU.
template <int KIND>
inline void activate(const Expert& expert, const float* gates, const float* ups, int64_t first, int64_t count, float* to) {
    const float* bias = expert.inner_bias ? expert.inner_bias + first : nullptr;
    const float* up_bias = bias && KIND != RELU ? bias + expert.gate_up.num_outputs / 2 : bias;
    const V alpha = set1(expert.alpha), limit = set1(expert.limit);
    for (int64_t f = 0; f < count; f += 16) {
        V gate = load(gates + f), up = load(ups + f);
        if (bias) {
            gate = add(gate, load(bias + f));
            up = add(up, load(up_bias + f));
        }
        store(to + f, activate_lanes<KIND>(gate, up, alpha, limit));
    }
}

void activate_span(const Expert& expert, const float* gates, const float* ups, int64_t first, int64_t count, float* to) {
    switch (expert.activation) {
        case SWIGLU: activate<SWIGLU>(expert, gates, ups, first, count, to); break;
        case GEGLU_TANH: activate<GEGLU_TANH>(expert, gates, ups, first, count, to); break;
        case CLAMPED_SWIGLU: activate<CLAMPED_SWIGLU>(expert, gates, ups, first, count, to); break;
        case RELU: activate<RELU>(expert, gates, ups, first, count, to); break;
    }
}

inline int64_t padded_width(const Expert& expert) {
    return expert.activation == RELU ? expert.gate_up.num_outputs : expert.gate_up.num_outputs / 2;
}

// Rows of inner, each [gate | up], with the neurons in place of gate.
void activate_rows(const Expert& expert, float* inner, int64_t rows, int64_t wide) {
    const int64_t padded = padded_width(expert), behind = expert.activation == RELU ? 0 : padded;
    for (int64_t i = 0; i < rows; ++i)
        activate_span(expert, inner + i * wide, inner + i * wide + behind, 0, padded, inner + i * wide);
}

constexpr int64_t MOST_ROWS = 48;  // of one expert at a time: gate_up of 48 rows stays in cache

#include "sliced.h"

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
