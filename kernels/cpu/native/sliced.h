// Parts of experts: some slices of their neurons for rows that want no more, and gate neurons. Included by experts.h.

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

// out[i][16 j ..) = x[i] times panel j of a list of panels of K inputs, all of 16 outputs: panels from several places of
// one weight, or of several, share a tile. A tile of two panels would wait for its own sums more than it computes.
template <class W>
void dot_panels(const char* const* panels, int64_t num_panels, int64_t K, const float* const* x, float* const* out,
                int64_t T) {
    const int64_t row_tiles = parts_of(T, MAX_ROWS);
    const int widest = panels_for((int)parts_of(T, row_tiles));
    const int64_t groups = parts_of(num_panels, widest);
    Tile tile;
    tile.K = K;
    tile.add = false;
    tile.last_lanes = 16;
    tile.ahead = 0;
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t p0 = part_begin(num_panels, groups, g), p1 = part_begin(num_panels, groups, g + 1);
        for (int64_t p = p0; p < p1; ++p) tile.w[p - p0] = panels[p];
        for (int64_t t = 0; t < row_tiles; ++t) {
            const int64_t r0 = part_begin(T, row_tiles, t), r1 = part_begin(T, row_tiles, t + 1);
            for (int64_t r = r0; r < r1; ++r) {
                tile.x[r - r0] = x[r];
                tile.out[r - r0] = out[r] + 16 * p0;
            }
            dot_any<W>((int)(r1 - r0), (int)(p1 - p0), tile);
        }
    }
}

inline bool has_float_panels(const Panels& w) { return w.format == BF16 || w.format == F16 || w.format == F32; }

void panels_by_pointer(int format, const char* const* panels, int64_t num_panels, int64_t K, const float* const* x,
                       float* const* out, int64_t T) {
    switch (format) {
        case BF16: dot_panels<Bf16Weights>(panels, num_panels, K, x, out, T); break;
        case F16: dot_panels<F16Weights>(panels, num_panels, K, x, out, T); break;
        case F32: dot_panels<F32Weights>(panels, num_panels, K, x, out, T); break;
    }
}

constexpr int64_t MOST_PANELS = 256;  // of gate and up together that a list of panels holds

// The neurons of some slices for `m` rows: panels of gate and up that the slices touch, side by side. Writes
// inner[i][16 p ..) for every such panel p.
inline void neurons_of_slices(const Expert& expert, int slices, int64_t width, int64_t parts, const float* const* xs,
                              float* const* inner, int64_t m) {
    const Panels& w = expert.gate_up;
    const int64_t padded = padded_width(expert), halves = expert.activation == RELU ? 1 : 2;
    const int64_t most = halves * parts_of(padded, 16);
    const auto each_range = [&](const auto& run) {  // runs of panels without one twice
        for (int64_t s = 0, from = 0; s < parts; ++s) {
            if (!(slices >> s & 1)) continue;
            int64_t last = s;
            while (last + 1 < parts && slices >> (last + 1) & 1) ++last;
            const int64_t p0 = s * width / 16 > from ? s * width / 16 : from, p1 = parts_of((last + 1) * width, 16);
            if (p1 > p0) run(p0, p1);
            from = p1 > from ? p1 : from;
            s = last;
        }
    };
    if (!has_float_panels(w) || m >= WIDE_ROWS || most > MOST_PANELS) {
        each_range([&](int64_t p0, int64_t p1) {
            float *gates[MOST_ROWS], *ups[MOST_ROWS];
            for (int64_t i = 0; i < m; ++i) {
                gates[i] = inner[i] + 16 * p0;
                ups[i] = gates[i] + padded;
            }
            rows_by_pointer(panel_range(w, p0, p1), xs, gates, m, false, nullptr);
            if (halves == 2) rows_by_pointer(panel_range(w, padded / 16 + p0, padded / 16 + p1), xs, ups, m, false, nullptr);
            for (int64_t i = 0; i < m; ++i)
                activate_span(expert, gates[i], halves == 2 ? ups[i] : gates[i], 16 * p0, 16 * (p1 - p0), gates[i]);
        });
        return;
    }
    const char* panels[MOST_PANELS];
    int64_t n = 0;
    each_range([&](int64_t p0, int64_t p1) {
        for (int64_t p = p0; p < p1; ++p) panels[n++] = w.data + p * w.panel_bytes;
    });
    const int64_t behind = halves == 2 ? 16 * n : 0;
    for (int64_t p = 0; p < (halves - 1) * n; ++p) panels[n + p] = panels[p] + padded / 16 * w.panel_bytes;
    float* packed = (float*)scratch(SMALL, (size_t)(m * halves * 16 * n) * sizeof(float));
    float* outs[MOST_ROWS];
    for (int64_t i = 0; i < m; ++i) outs[i] = packed + i * halves * 16 * n;
    panels_by_pointer(w.format, panels, halves * n, w.num_inputs, xs, outs, m);
    for (int64_t i = 0; i < m; ++i) {
        const float* from = outs[i];
        each_range([&](int64_t p0, int64_t p1) {
            activate_span(expert, from, from + behind, 16 * p0, 16 * (p1 - p0), inner[i] + 16 * p0);
            from += 16 * (p1 - p0);
        });
    }
}

// Rows that want some slices of an expert: a slice's neurons for the rows that want it, and their sums with `down`.
void sliced_rows(const Expert& expert, const ExpertCall& call, int64_t first, int64_t n) {
    const int64_t wide = expert.gate_up.num_outputs, F = expert.down.num_inputs, parts = call.parts;
    const int64_t width = F / parts, step = input_step(expert.down.format), D = expert.down.num_outputs;
    const int64_t spread = parts_of(width, step) * step + step;  // inputs that a slice may touch
    float* inner = (float*)scratch(INNER, (size_t)(n * (wide + spread)) * sizeof(float));
    float* aligned = inner + n * wide;
    const int32_t* masks = call.masks + first;
    const auto wanted = [&](int64_t s, int64_t i) { return (masks[i] >> s & 1) != 0; };
    const float* xs[MOST_ROWS];
    float *rows[MOST_ROWS], *outs[MOST_ROWS];
    for (int64_t i = 0; i < n; ++i)
        __builtin_memset(call.out + call.out_rows[first + i] * call.out_stride, 0, (size_t)D * sizeof(float));
    for (int64_t s = 0, done = 0; s < parts; ++s) {
        if (done >> s & 1) continue;
        int slices = 0;  // those that the same rows want
        for (int64_t other = s; other < parts; ++other) {
            bool is_alike = true;
            for (int64_t i = 0; i < n; ++i) is_alike = is_alike && wanted(s, i) == wanted(other, i);
            if (is_alike) slices |= 1 << other;
        }
        done |= slices;
        int64_t m = 0;
        for (int64_t i = 0; i < n; ++i) {
            if (!wanted(s, i)) continue;
            xs[m] = call.x + call.rows[first + i] * call.x_stride;
            rows[m++] = inner + i * wide;
        }
        if (m > 0) neurons_of_slices(expert, slices, width, parts, xs, rows, m);
    }
    for (int64_t s = 0; s < parts; ++s) {
        const int64_t a = s * width, b = a + width, from = a / step * step, to = at_most(parts_of(b, step) * step, F);
        int64_t m = 0;
        for (int64_t i = 0; i < n; ++i) {
            if (!wanted(s, i)) continue;
            const float* row = inner + i * wide;
            xs[m] = row + a;
            if (from != a || to != b) {  // neurons beside the slice count nothing
                float* whole = aligned + i * spread;
                __builtin_memset(whole, 0, (size_t)spread * sizeof(float));
                __builtin_memcpy(whole + (a - from), row + a, (size_t)width * sizeof(float));
                xs[m] = whole;
            }
            outs[m++] = call.out + call.out_rows[first + i] * call.out_stride;
        }
        if (m > 0) rows_by_pointer(input_range(expert.down, from, to), xs, outs, m, true, nullptr);
    }
    if (!expert.down_bias) return;
    for (int64_t i = 0; i < n; ++i) {
        float* out = call.out + call.out_rows[first + i] * call.out_stride;
        const float share = (float)__builtin_popcount((unsigned)masks[i]) / (float)parts;
        for (int64_t d = 0; d < D; ++d) out[d] = out[d] + expert.down_bias[d] * share;
    }
}

// What the neurons of `n` small experts of one shape give for one row: out[j] of expert j, whole panels apart.
void neurons_of_row(const Expert* const* experts, int64_t n, const float* x, float* out) {
    const Panels& w = experts[0]->gate_up;
    const int64_t padded = padded_width(*experts[0]), wide = w.num_outputs, each = wide / 16;
    float* inner = (float*)scratch(INNER, (size_t)(n * wide) * sizeof(float));
    const int64_t together = at_most(n, MOST_PANELS / each);
    const char* panels[MOST_PANELS];
    for (int64_t j = 0; j < n;) {
        const int64_t count = at_most(together, n - j);
        float* to = inner + j * wide;
        if (has_float_panels(w) && count > 0) {
            for (int64_t p = 0; p < count * each; ++p)
                panels[p] = experts[j + p / each]->gate_up.data + p % each * w.panel_bytes;
            panels_by_pointer(w.format, panels, count * each, w.num_inputs, &x, &to, 1);
            j += count;
        } else {
            rows_by_pointer(experts[j]->gate_up, &x, &to, 1, false, nullptr);
            ++j;
        }
    }
    const int64_t behind = experts[0]->activation == RELU ? 0 : padded;
    for (int64_t j = 0; j < n; ++j)
        activate_span(*experts[j], inner + j * wide, inner + j * wide + behind, 0, padded, out + j * padded);
}
