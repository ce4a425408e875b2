// Many rows of x: weights widened once for all of them. Included by matmul.h.
//
// Many rows: a block of panels is widened once, into the first-level cache, and all tiles of rows read it there. The
// chains go on from block to block in `acc`, so the sums are those of the tiles above.
constexpr int64_t WIDE_K = 128;  // inputs a block; 3 panels of them are 24 KB
constexpr int64_t WIDE_ROWS = 32;  // at 16 rows the widening costs as much as it saves, on a Xeon of 2023

struct WideTile {
    const float* x[MAX_ROWS];  // from the block's first input on
    const float* w;            // [PANELS][WIDE_K][16]
    float* acc;                // [ROWS][PANELS][16]
    int64_t count;             // inputs of this block
};

template <int ROWS, int PANELS>
__attribute__((noinline)) void wide_tile(const WideTile& tile) {
    const float* x[ROWS];
    V acc[ROWS][PANELS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) x[i] = tile.x[i];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < PANELS; ++j) acc[i][j] = load(tile.acc + (i * PANELS + j) * 16);
    const float* w = tile.w;
    for (int64_t k = 0; k < tile.count; ++k, w += 16) {
        V b[PANELS];
#pragma GCC unroll 8
        for (int j = 0; j < PANELS; ++j) b[j] = load(w + j * WIDE_K * 16);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i) {
            V a = set1(x[i][k]);
#pragma GCC unroll 8
            for (int j = 0; j < PANELS; ++j) acc[i][j] = fma(a, b[j], acc[i][j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < PANELS; ++j) store(tile.acc + (i * PANELS + j) * 16, acc[i][j]);
}

template <int ROWS>
void wide_rows(int panels, const WideTile& tile) {
    constexpr int MOST = panels_for(ROWS);
    switch (panels) {
        case 1: wide_tile<ROWS, 1>(tile); break;
        case 2: if constexpr (MOST >= 2) wide_tile<ROWS, 2>(tile); break;
        case 3: if constexpr (MOST >= 3) wide_tile<ROWS, 3>(tile); break;
        case 4: if constexpr (MOST >= 4) wide_tile<ROWS, 4>(tile); break;
        case 5: if constexpr (MOST >= 5) wide_tile<ROWS, 5>(tile); break;
    }
}

// Nearly equal tiles of WIDE_ROWS rows or more are never as small as half of MAX_ROWS.
void wide_any(int rows, int panels, const WideTile& tile) {
    switch (rows) {
        case 3: if constexpr (MAX_ROWS == 4) wide_rows<3>(panels, tile); break;
        case 4: if constexpr (MAX_ROWS <= 6) wide_rows<4>(panels, tile); break;
        case 5: if constexpr (MAX_ROWS >= 5) wide_rows<5>(panels, tile); break;
        case 6: if constexpr (MAX_ROWS >= 6) wide_rows<6>(panels, tile); break;
        case 7: if constexpr (MAX_ROWS >= 7) wide_rows<7>(panels, tile); break;
        case 8: if constexpr (MAX_ROWS >= 8) wide_rows<8>(panels, tile); break;
    }
}

// Inputs [k, k + count) of a panel as float32 [count][16]; k is a multiple of WIDE_K.
template <class W>
void widen(const char* panel, int64_t k, int64_t count, float* to) {
    const char* from = panel + k / 2 * W::PAIR_BYTES;
    for (int64_t pair = 0; pair < (count + 1) / 2; ++pair, from += W::PAIR_BYTES) {
        store(to + pair * 32, W::even(from));
        store(to + pair * 32 + 16, W::odd(from));
    }
}

template <class W>
void dot_many_rows(const Panels& w, const float* const* x, float* const* out, int64_t T, bool add_out) {
    const int64_t panels = parts_of(w.num_outputs, 16), K = w.num_inputs;
    const int64_t row_tiles = parts_of(T, MAX_ROWS);
    const int64_t widest = panels_for((int)parts_of(T, row_tiles));
    const int64_t groups = parts_of(panels, widest);
    float* wide = (float*)scratch(WIDE, (size_t)(widest * (WIDE_K + T) * 64));
    float* acc = wide + widest * WIDE_K * 16;
    WideTile tile;
    tile.w = wide;
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t p0 = part_begin(panels, groups, g), n = part_begin(panels, groups, g + 1) - p0;
        const char* data = w.data + p0 * w.panel_bytes;
        __builtin_memset(acc, 0, (size_t)(T * n * 64));
        for (int64_t k = 0; k < K; k += WIDE_K) {
            tile.count = at_most(WIDE_K, K - k);
            for (int64_t j = 0; j < n; ++j)
                widen<W>(data + j * w.panel_bytes, k, tile.count, wide + j * WIDE_K * 16);
            const bool last = k + WIDE_K >= K;
            for (int64_t t = 0; t < row_tiles; ++t) {
                const int64_t r0 = part_begin(T, row_tiles, t), r1 = part_begin(T, row_tiles, t + 1);
                for (int64_t r = r0; r < r1; ++r) {
                    tile.x[r - r0] = x[r] + k;
                    // What is written at the end is fetched while the sums run.
                    if (last)
                        for (int64_t j = 0; j < n; ++j) __builtin_prefetch(out[r] + 16 * (p0 + j), 1, 3);
                }
                tile.acc = acc + r0 * n * 16;
                wide_any((int)(r1 - r0), (int)n, tile);
                if (!last) continue;
                for (int64_t r = r0; r < r1; ++r)
                    for (int64_t j = 0; j < n; ++j)
                        put(out[r] + 16 * (p0 + j), load(acc + (r * n + j) * 16),
                            (int)at_most(16, w.num_outputs - 16 * (p0 + j)), add_out);
            }
        }
    }
}
