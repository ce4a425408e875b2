// Attention over paged keys and values. Included by an ISA unit inside its own anonymous namespace.
//
// A block of keys is one float32 panel (its 16 tokens are the lanes), so scores are chains over p; a block of values has
// p in the lanes, so outputs are chains over tokens in order. Rows of one request, and the query heads of one kv head,
// share the loads; each keeps its own chain.

struct ValueTile {
    const float* p[MAX_ROWS];  // probabilities by token
    float* out[MAX_ROWS];      // continues from here unless begin is 0
    const float* const* blocks;
    int64_t stride;  // elements from one token's values to the next one's: P
    int64_t column;
    int64_t begin, end;  // tokens
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
            acc[i][j] = tile.begin == 0 ? zero() : WHOLE || j + 1 < PANELS ? load(out) : load_part(out, tile.lanes);
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

void weigh_values(int rows, ValueTile& tile, int64_t P) {
    if (tile.begin >= tile.end) return;
    const int64_t panels = parts_of(P, 16), groups = parts_of(panels, panels_for(rows));
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t p0 = part_begin(panels, groups, g), p1 = part_begin(panels, groups, g + 1);
        tile.column = 16 * p0;
        tile.lanes = (int)at_most(16, P - 16 * (p1 - 1));
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

// scores -> unnormalised probabilities in place; returns their sum. Lanes beyond `length` are neither used nor counted.
float soften(float* scores, int64_t length, float scale) {
    const V lowest = set1(-__builtin_inff());
    V most = lowest;
    for (int64_t t = 0; t < length; t += 16) {
        V s = mul(load(scores + t), set1(scale));
        if (length - t < 16) s = keep_first(s, (int)(length - t), lowest);
        store(scores + t, s);
        most = max(most, s);
    }
    const V top = set1(lane_max(most));
    V total = zero();
    for (int64_t t = 0; t < length; t += 16) {
        V e = exp_lanes(sub(load(scores + t), top));
        if (length - t < 16) e = keep_first(e, (int)(length - t), zero());
        store(scores + t, e);
        total = add(total, e);
    }
    return lane_sum(total);
}

// Queries that read the same kv head: `num_rows` rows of one request times `num_heads` heads, at most MAX_ROWS together.
void attend(const AttentionCall& call, int64_t row, int64_t num_rows, int64_t g, int64_t head, int64_t num_heads) {
    const int64_t P = call.pages.P, G = call.pages.G;
    const int rows = (int)(num_rows * num_heads);
    int64_t shortest = call.row_position[row] + 1, longest = shortest;
    for (int64_t r = row + 1; r < row + num_rows; ++r) {
        shortest = at_most(shortest, call.row_position[r] + 1);
        if (longest < call.row_position[r] + 1) longest = call.row_position[r] + 1;
    }
    const int64_t blocks = parts_of(longest, 16);
    const int32_t* table = call.block_tables + call.row_request[row] * call.M;
    float* scores = (float*)scratch(SCORES, (size_t)(rows * blocks) * 16 * sizeof(float));
    const float** values = (const float**)scratch(POINTERS, (size_t)blocks * sizeof(float*));
    for (int64_t b = 0; b < blocks; ++b) values[b] = call.pages.v + (table[b] * G + g) * 16 * P;

    Tile keys;
    ValueTile weigh;
    for (int i = 0; i < rows; ++i) {
        const int64_t r = row + i / num_heads, h = head + i % num_heads;
        keys.x[i] = call.q + r * call.q_stride + h * P;
        weigh.p[i] = scores + i * blocks * 16;
        weigh.out[i] = call.out + r * call.out_stride + h * P;
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
    for (int i = 0; i < rows; ++i)
        sums[i] = soften(scores + i * blocks * 16, call.row_position[row + i / num_heads] + 1, call.scale);

    weigh.blocks = values;
    weigh.stride = P;
    weigh.begin = 0;
    weigh.end = shortest;
    weigh_values(rows, weigh, P);
    for (int64_t r = 0; r < num_rows; ++r) {  // what a row sees beyond the shortest one, its own tail
        ValueTile tail = weigh;
        tail.begin = shortest;
        tail.end = call.row_position[row + r] + 1;
        for (int64_t h = 0; h < num_heads; ++h) {
            tail.p[h] = weigh.p[r * num_heads + h];
            tail.out[h] = weigh.out[r * num_heads + h];
        }
        weigh_values((int)num_heads, tail, P);
    }
    for (int i = 0; i < rows; ++i)
        for (int64_t p = 0; p < P; p += 16)
            store_lanes(weigh.out[i] + p, div(load_lanes(weigh.out[i] + p, P - p), set1(sums[i])), P - p);
}

void paged_attention(const AttentionCall& call) {
    const int64_t per_group = call.H / call.pages.G;
    const int64_t head_parts = parts_of(per_group, MAX_ROWS);
    const int64_t most_rows = head_parts > 1 ? 1 : MAX_ROWS / per_group;
    for (int64_t row = 0; row < call.T;) {
        int64_t n = 1;
        while (n < most_rows && row + n < call.T && call.row_request[row + n] == call.row_request[row]) ++n;
        for (int64_t g = 0; g < call.pages.G; ++g)
            for (int64_t part = 0; part < head_parts; ++part) {
                const int64_t h0 = part_begin(per_group, head_parts, part);
                const int64_t h1 = part_begin(per_group, head_parts, part + 1);
                attend(call, row, n, g, g * per_group + h0, h1 - h0);
            }
        row += n;
    }
}
