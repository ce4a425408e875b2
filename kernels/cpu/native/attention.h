// Attention over paged keys and values. Included by an ISA unit inside its own anonymous namespace.
//
// A block of keys is one float32 panel (its 16 tokens are the lanes), so scores are chains over p; a block of values has
// p in the lanes, so outputs are chains over tokens in order. Rows of one request, and the query heads of one kv head,
// share the loads; each keeps its own chain.

struct ValueTile {
    const float* p[MAX_ROWS];  // probabilities by token
    float* out[MAX_ROWS];      // continues from here unless `fresh`
    const float* const* blocks;
    int64_t stride;  // elements from one token's values to the next one's: Pv
    int64_t column;
    int64_t begin, end;  // tokens, counted from the first of `blocks`
    bool fresh;
    int lanes;           // of the last panel
};

template <int ROWS, int PANELS, bool WHOLE>
__attribute__((noinline)) void value_tile(const ValueTile& tile) {
    V acc[ROWS][PANELS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < PANELS; ++j) {
            const float* out = tile.out[i] + tile.column + 16 * j;
            acc[i][j] = tile.fresh ? zero() : WHOLE || j + 1 < PANELS ? load(out) : load_part(out, tile.lanes);
        }
    const float* p[ROWS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) p[i] = tile.p[i];

    for (int64_t token = tile.begin; token < tile.end;) {
        const float* v = tile.blocks[token / 16] + (token % 16) * tile.stride + tile.column;
        const int64_t stop = at_most(tile.end, (token / 16 + 1) * 16);
        for (; token < stop; ++token, v += tile.stride) {
            V b[PANELS];
#pragma GCC unroll 8
            for (int j = 0; j < PANELS; ++j) b[j] = WHOLE || j + 1 < PANELS ? load(v + 16 * j) : load_part(v + 16 * j, tile.lanes);
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; ++i) {
                V a = set1(p[i][token]);
#pragma GCC unroll 8
                for (int j = 0; j < PANELS; ++j) acc[i][j] = fma(a, b[j], acc[i][j]);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < PANELS; ++j) {
            float* out = tile.out[i] + tile.column + 16 * j;
            if (WHOLE || j + 1 < PANELS)
                store(out, acc[i][j]);
            else
                store_part(out, acc[i][j], tile.lanes);
        }
}

template <int ROWS>
void value_rows(int panels, const ValueTile& tile) {
    constexpr int MOST = panels_for(ROWS);
    const bool whole = tile.lanes == 16;
    switch (panels) {
        case 1: whole ? value_tile<ROWS, 1, true>(tile) : value_tile<ROWS, 1, false>(tile); break;
        case 2: if constexpr (MOST >= 2) whole ? value_tile<ROWS, 2, true>(tile) : value_tile<ROWS, 2, false>(tile); break;
        case 3: if constexpr (MOST >= 3) whole ? value_tile<ROWS, 3, true>(tile) : value_tile<ROWS, 3, false>(tile); break;
        case 4: if constexpr (MOST >= 4) whole ? value_tile<ROWS, 4, true>(tile) : value_tile<ROWS, 4, false>(tile); break;
        case 5: if constexpr (MOST >= 5) whole ? value_tile<ROWS, 5, true>(tile) : value_tile<ROWS, 5, false>(tile); break;
        case 6: if constexpr (MOST >= 6) whole ? value_tile<ROWS, 6, true>(tile) : value_tile<ROWS, 6, false>(tile); break;
        case 7: if constexpr (MOST >= 7) whole ? value_tile<ROWS, 7, true>(tile) : value_tile<ROWS, 7, false>(tile); break;
        case 8: if constexpr (MOST >= 8) whole ? value_tile<ROWS, 8, true>(tile) : value_tile<ROWS, 8, false>(tile); break;
    }
}

void weigh_values(int rows, ValueTile& tile, int64_t Pv) {
    if (tile.begin >= tile.end) return;
    const int64_t panels = parts_of(Pv, 16), groups = parts_of(panels, panels_for(rows));
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t p0 = part_begin(panels, groups, g), p1 = part_begin(panels, groups, g + 1);
        tile.column = 16 * p0;
        tile.lanes = (int)at_most(16, Pv - 16 * (p1 - 1));
        const int n = (int)(p1 - p0);
        switch (rows) {
            case 1: value_rows<1>(n, tile); break;
            case 2: value_rows<2>(n, tile); break;
            case 3: value_rows<3>(n, tile); break;
            case 4: value_rows<4>(n, tile); break;
            case 5: if constexpr (MAX_ROWS >= 5) value_rows<5>(n, tile); break;
            case 6: if constexpr (MAX_ROWS >= 6) value_rows<6>(n, tile); break;
            case 7: if constexpr (MAX_ROWS >= 7) value_rows<7>(n, tile); break;
            case 8: if constexpr (MAX_ROWS >= 8) value_rows<8>(n, tile); break;
        }
    }
}

// What the lanes of a block that begins at token t lack of the tokens [begin, end) becomes `other`.
inline V keep_seen(V v, int64_t t, int64_t begin, int64_t end, V other) {
    if (end - t < 16) v = keep_first(v, (int)(end - t), other);
    if (begin > t) v = keep_first(other, (int)(begin - t), v);
    return v;
}

// What distances add to the scores of the 16 tokens from t on, for a row that stands at `own`: see biased_attention.
inline V distance_bias(const float* bias, int64_t reach, int64_t t, int64_t own) {
    if (t - own >= -reach && t + 15 - own <= reach) return load(bias + t - own + reach);
    float lanes[16];
    for (int64_t i = 0; i < 16; ++i) {
        const int64_t distance = t + i - own;
        lanes[i] = bias[reach + (distance < -reach ? -reach : distance > reach ? reach : distance)];
    }
    return load(lanes);
}

// scores -> unnormalised probabilities in place; returns their sum. Only the tokens [begin, end) are used and counted; a
// token's lane is its place in its block, so that the sum does not depend on where the scores begin.
// With a bias the scores begin at position 0, since there is no window then.
float soften(float* scores, int64_t begin, int64_t end, const AttentionCall& call, int64_t row, int64_t head) {
    const int64_t first = begin / 16 * 16;
    const V lowest = set1(-__builtin_inff()), scale = set1(call.scale), cap = set1(call.soft_cap);
    V most = lowest;
    const float* bias = call.bias ? call.bias + head * (2 * call.bias_reach + 1) : nullptr;
    for (int64_t t = first; t < end; t += 16) {
        V s = mul(load(scores + t), scale);
        if (bias) s = add(s, distance_bias(bias, call.bias_reach, t, call.own_position[row]));
        if (call.soft_cap > 0) s = mul(cap, tanh_lanes(div(s, cap)));
        s = keep_seen(s, t, begin, end, lowest);
        store(scores + t, s);
        most = max(most, s);
    }
    float highest = lane_max(most);
    if (call.sinks && !(highest > call.sinks[head])) highest = call.sinks[head];
    const V top = set1(highest);
    V total = zero();
    for (int64_t t = first; t < end; t += 16) {
        V e = keep_seen(exp_lanes(sub(load(scores + t), top)), t, begin, end, zero());
        store(scores + t, e);
        total = add(total, e);
    }
    float sum = lane_sum(total);
    if (call.sinks) {
        float sink[16];
        store(sink, exp_lanes(sub(set1(call.sinks[head]), top)));
        sum = sum + sink[0];
    }
    return sum;
}

// The first position that a row sees.
inline int64_t first_seen(const AttentionCall& call, int64_t row) {
    const int64_t length = call.row_position[row] + 1;
    return call.window > 0 && length > call.window ? length - call.window : 0;
}

// Queries that read the same kv head: `num_rows` rows of one request times `num_heads` heads, at most MAX_ROWS together.
void attend(const AttentionCall& call, int64_t row, int64_t num_rows, int64_t g, int64_t head, int64_t num_heads) {
    const int64_t P = call.pages.P, Pv = call.pages.Pv, G = call.pages.G;
    const int rows = (int)(num_rows * num_heads);
    // What all rows see is [latest, shortest); each sees [its first, its length), within [earliest, longest).
    int64_t shortest = call.row_position[row] + 1, longest = shortest;
    int64_t earliest = first_seen(call, row), latest = earliest;
    for (int64_t r = row + 1; r < row + num_rows; ++r) {
        const int64_t length = call.row_position[r] + 1, begin = first_seen(call, r);
        shortest = at_most(shortest, length);
        if (longest < length) longest = length;
        earliest = at_most(earliest, begin);
        if (latest < begin) latest = begin;
    }
    const int64_t first_block = earliest / 16, base = first_block * 16;
    const int64_t blocks = parts_of(longest, 16) - first_block;
    const int32_t* table = call.block_tables + call.row_request[row] * call.M + first_block;
    float* scores = (float*)scratch(SCORES, (size_t)(rows * blocks) * 16 * sizeof(float));
    const float** values = (const float**)scratch(POINTERS, (size_t)blocks * sizeof(float*));
    for (int64_t b = 0; b < blocks; ++b) values[b] = call.pages.v + (table[b] * G + g) * 16 * Pv;

    Tile keys{};
    ValueTile weigh;
    for (int i = 0; i < rows; ++i) {
        const int64_t r = row + i / num_heads, h = head + i % num_heads;
        keys.x[i] = call.q + r * call.q_stride + h * call.q_head_stride;
        weigh.p[i] = scores + i * blocks * 16;
        weigh.out[i] = call.out + r * call.out_stride + h * call.out_head_stride;
    }
    keys.K = P;
    keys.ahead = 0;
    keys.last_lanes = 16;
    keys.add = false;
    const int64_t groups = parts_of(blocks, panels_for(rows));
    for (int64_t n = 0; n < groups; ++n) {
        const int64_t b0 = part_begin(blocks, groups, n), b1 = part_begin(blocks, groups, n + 1);
        for (int64_t b = b0; b < b1; ++b) keys.w[b - b0] = (const char*)(call.pages.k + (table[b] * G + g) * 16 * P);
        for (int i = 0; i < rows; ++i) keys.out[i] = scores + (i * blocks + b0) * 16;
        dot_any<F32Weights>(rows, (int)(b1 - b0), keys);
    }

    float sums[MAX_ROWS];
    for (int i = 0; i < rows; ++i) {
        const int64_t r = row + i / num_heads;
        sums[i] = soften(scores + i * blocks * 16, first_seen(call, r) - base, call.row_position[r] + 1 - base, call, r,
                         head + i % num_heads);
    }

    weigh.blocks = values;
    weigh.stride = Pv;
    weigh.fresh = earliest == latest;
    if (!weigh.fresh)
        for (int i = 0; i < rows; ++i)
            for (int64_t p = 0; p < Pv; p += 16) store_lanes(weigh.out[i] + p, zero(), Pv - p);
    // One row's own stretch of tokens, between what all see.
    auto weigh_alone = [&](int64_t r, int64_t begin, int64_t end) {
        ValueTile own = weigh;
        own.begin = begin - base;
        own.end = end - base;
        own.fresh = false;
        for (int64_t h = 0; h < num_heads; ++h) {
            own.p[h] = weigh.p[r * num_heads + h];
            own.out[h] = weigh.out[r * num_heads + h];
        }
        weigh_values((int)num_heads, own, Pv);
    };
    if (latest < shortest) {
        for (int64_t r = 0; r < num_rows; ++r) weigh_alone(r, first_seen(call, row + r), latest);
        weigh.begin = latest - base;
        weigh.end = shortest - base;
        weigh_values(rows, weigh, Pv);
        for (int64_t r = 0; r < num_rows; ++r) weigh_alone(r, shortest, call.row_position[row + r] + 1);
    } else {
        for (int64_t r = 0; r < num_rows; ++r) weigh_alone(r, first_seen(call, row + r), call.row_position[row + r] + 1);
    }
    for (int i = 0; i < rows; ++i)
        for (int64_t p = 0; p < Pv; p += 16)
            store_lanes(weigh.out[i] + p, div(load_lanes(weigh.out[i] + p, Pv - p), set1(sums[i])), Pv - p);
}

void paged_attention(const AttentionCall& call) {
    const int64_t per_group = call.H / call.pages.G;
    const int64_t head_parts = parts_of(per_group, MAX_ROWS);
    const int64_t most_rows = head_parts > 1 ? 1 : MAX_ROWS / per_group;
    for (int64_t row = 0; row < call.T;) {
        int64_t n = 1;
        // With a window only neighbours, so that every block from the first to the last is one that some row sees.
        while (n < most_rows && row + n < call.T && call.row_request[row + n] == call.row_request[row] &&
               (call.window == 0 || call.row_position[row + n] == call.row_position[row + n - 1] + 1))
            ++n;
        for (int64_t g = 0; g < call.pages.G; ++g)
            for (int64_t part = 0; part < head_parts; ++part) {
                const int64_t h0 = part_begin(per_group, head_parts, part);
                const int64_t h1 = part_begin(per_group, head_parts, part + 1);
                attend(call, row, n, g, g * per_group + h0, h1 - h0);
            }
        row += n;
    }
}
