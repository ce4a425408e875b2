// Dot products as one chain of fused multiply-adds per output, in increasing k, from 0. Included by an ISA unit inside
// its own anonymous namespace.
//
// The lanes are outputs, so how rows and panels are tiled never changes a bit; only speed hangs on the tile sizes.

// A format tells how its panels are read: two inputs of 16 outputs at a time.
struct Bf16Weights {
    static constexpr int PAIR_BYTES = 64;
    static inline V even(const char* p) { return bf16_even(p); }
    static inline V odd(const char* p) { return bf16_odd(p); }
};
struct F16Weights {
    static constexpr int PAIR_BYTES = 64;
    static inline V even(const char* p) { return f16_lanes(p); }
    static inline V odd(const char* p) { return f16_lanes(p + 32); }
};
struct F32Weights {
    static constexpr int PAIR_BYTES = 128;
    static inline V even(const char* p) { return load((const float*)p); }
    static inline V odd(const char* p) { return load((const float*)(p + 64)); }
};

// Rows x panels of accumulators that fit the registers: 32 zmm, 16 ymm (two per V), 32 NEON (four per V).
#if defined(EDGE_AVX512)
constexpr int MAX_ROWS = 8, MAX_PANELS = 8;
constexpr int panels_for(int rows) { return rows <= 2 ? 8 : rows == 3 ? 6 : rows == 4 ? 5 : rows <= 6 ? 4 : 3; }
#elif defined(EDGE_AVX2)
constexpr int MAX_ROWS = 6, MAX_PANELS = 4;
constexpr int panels_for(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#elif defined(__aarch64__)
constexpr int MAX_ROWS = 6, MAX_PANELS = 4;
constexpr int panels_for(int rows) { return rows == 1 ? 4 : rows == 2 ? 3 : rows == 3 ? 2 : 1; }
#else
constexpr int MAX_ROWS = 4, MAX_PANELS = 1;
constexpr int panels_for(int) { return 1; }
#endif

struct Tile {
    const float* x[MAX_ROWS];
    const char* w[MAX_PANELS];
    float* out[MAX_ROWS];
    int64_t K;
    int64_t ahead;   // bytes from a panel to the one that will be read when this tile is done; 0 if there is none
    int last_lanes;  // lanes of the last panel that exist
    bool add;
};

template <int PANELS>
inline void put(const Tile& tile, int row, int panel, V dot) {
    put(tile.out[row] + 16 * panel, dot, panel + 1 < PANELS ? 16 : tile.last_lanes, tile.add);
}

template <class W, int ROWS, int PANELS>
__attribute__((noinline)) void dot_tile(const Tile& tile) {
    const float* x[ROWS];
    const char* w[PANELS];
    V acc[ROWS][PANELS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) x[i] = tile.x[i];
#pragma GCC unroll 8
    for (int j = 0; j < PANELS; ++j) w[j] = tile.w[j];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < PANELS; ++j) acc[i][j] = zero();

    const int64_t pairs = tile.K / 2, ahead = tile.ahead;
    for (int64_t pair = 0; pair < pairs; ++pair) {
        V b[PANELS];
        // The next group of panels on its way to the first-level cache. Without for one row: fetching gains 5 % where weights lie
        // in memory (bfloat16, experts of 3 MB), and loses 9 % where they lie in a cache (those of the demo model).
        if constexpr (ROWS >= 2) {
#pragma GCC unroll 8
            for (int j = 0; j < PANELS; ++j) __builtin_prefetch(w[j] + pair * W::PAIR_BYTES + ahead, 0, 3);
        }
#pragma GCC unroll 8
        for (int j = 0; j < PANELS; ++j) b[j] = W::even(w[j] + pair * W::PAIR_BYTES);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i) {
            V a = set1(x[i][2 * pair]);
#pragma GCC unroll 8
            for (int j = 0; j < PANELS; ++j) acc[i][j] = fma(a, b[j], acc[i][j]);
        }
#pragma GCC unroll 8
        for (int j = 0; j < PANELS; ++j) b[j] = W::odd(w[j] + pair * W::PAIR_BYTES);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i) {
            V a = set1(x[i][2 * pair + 1]);
#pragma GCC unroll 8
            for (int j = 0; j < PANELS; ++j) acc[i][j] = fma(a, b[j], acc[i][j]);
        }
    }
    if (tile.K & 1) {
#pragma GCC unroll 8
        for (int j = 0; j < PANELS; ++j) {
            V b = W::even(w[j] + pairs * W::PAIR_BYTES);
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; ++i) acc[i][j] = fma(set1(x[i][2 * pairs]), b, acc[i][j]);
        }
    }

#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < PANELS; ++j) put<PANELS>(tile, i, j, acc[i][j]);
}

template <class W, int ROWS>
void dot_rows(int panels, const Tile& tile) {
    constexpr int MOST = panels_for(ROWS);
    switch (panels) {
        case 1: dot_tile<W, ROWS, 1>(tile); break;
        case 2: if constexpr (MOST >= 2) dot_tile<W, ROWS, 2>(tile); break;
        case 3: if constexpr (MOST >= 3) dot_tile<W, ROWS, 3>(tile); break;
        case 4: if constexpr (MOST >= 4) dot_tile<W, ROWS, 4>(tile); break;
        case 5: if constexpr (MOST >= 5) dot_tile<W, ROWS, 5>(tile); break;
        case 6: if constexpr (MOST >= 6) dot_tile<W, ROWS, 6>(tile); break;
        case 7: if constexpr (MOST >= 7) dot_tile<W, ROWS, 7>(tile); break;
        case 8: if constexpr (MOST >= 8) dot_tile<W, ROWS, 8>(tile); break;
    }
}

template <class W>
void dot_any(int rows, int panels, const Tile& tile) {
    switch (rows) {
        case 1: dot_rows<W, 1>(panels, tile); break;
        case 2: dot_rows<W, 2>(panels, tile); break;
        case 3: dot_rows<W, 3>(panels, tile); break;
        case 4: dot_rows<W, 4>(panels, tile); break;
        case 5: if constexpr (MAX_ROWS >= 5) dot_rows<W, 5>(panels, tile); break;
        case 6: if constexpr (MAX_ROWS >= 6) dot_rows<W, 6>(panels, tile); break;
        case 7: if constexpr (MAX_ROWS >= 7) dot_rows<W, 7>(panels, tile); break;
        case 8: if constexpr (MAX_ROWS >= 8) dot_rows<W, 8>(panels, tile); break;
    }
}

// out[i][0..N) (=|+=) x[i] W^T for rows given by pointers. Panels outside, rows inside: weights are read once. `then` is
// what will be read next, null if nothing is known.
template <class W>
void dot_rows_by_pointer(const Panels& w, const float* const* x, float* const* out, int64_t T, bool add,
                         const char* then) {
    const int64_t panels = parts_of(w.num_outputs, 16);
    const int64_t row_tiles = parts_of(T, MAX_ROWS);
    const int widest = panels_for((int)parts_of(T, row_tiles));
    const int64_t groups = parts_of(panels, widest);
    Tile tile;
    tile.K = w.num_inputs;
    tile.add = add;
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t p0 = part_begin(panels, groups, g), p1 = part_begin(panels, groups, g + 1);
        for (int64_t p = p0; p < p1; ++p) tile.w[p - p0] = w.data + p * w.panel_bytes;
        tile.last_lanes = (int)at_most(16, w.num_outputs - 16 * (p1 - 1));
        tile.ahead = g + 1 < groups ? (p1 - p0) * w.panel_bytes : then ? then - tile.w[0] : 0;
        for (int64_t t = 0; t < row_tiles; ++t) {
            const int64_t r0 = part_begin(T, row_tiles, t), r1 = part_begin(T, row_tiles, t + 1);
            for (int64_t r = r0; r < r1; ++r) {
                tile.x[r - r0] = x[r];
                tile.out[r - r0] = out[r] + 16 * p0;
            }
            dot_any<W>((int)(r1 - r0), (int)(p1 - p0), tile);
            tile.ahead = 0;
        }
    }
}

#include "wide.h"

template <class W>
void dot_format(const Panels& w, const float* const* x, float* const* out, int64_t T, bool add, const char* then) {
    if (T >= WIDE_ROWS && w.num_inputs > 0)
        dot_many_rows<W>(w, x, out, T, add);
    else
        dot_rows_by_pointer<W>(w, x, out, T, add, then);
}

void rows_by_pointer(const Panels& w, const float* const* x, float* const* out, int64_t T, bool add,
                     const char* then) {
    switch (w.format) {
        case BF16: dot_format<Bf16Weights>(w, x, out, T, add, then); break;
        case F16: dot_format<F16Weights>(w, x, out, T, add, then); break;
        case F32: dot_format<F32Weights>(w, x, out, T, add, then); break;
        default: integer_product(w, x, out, T, add, then); break;
    }
}

void linear(const Panels& w, const float* x, int64_t x_stride, int64_t T, float* out, int64_t out_stride, bool add) {
    // A block of rows is read again for every group of panels, so it has to stay in the second-level cache.
    constexpr int64_t MOST = 128;
    const int64_t fitting = (512 * 1024 / 4) / (w.num_inputs > 0 ? w.num_inputs : 1) / MAX_ROWS * MAX_ROWS;
    const int64_t block = fitting < MAX_ROWS ? MAX_ROWS : at_most(fitting, MOST / MAX_ROWS * MAX_ROWS);
    const float* xs[MOST];
    float* outs[MOST];
    for (int64_t t = 0; t < T; t += block) {
        const int64_t n = at_most(block, T - t);
        for (int64_t i = 0; i < n; ++i) {
            xs[i] = x + (t + i) * x_stride;
            outs[i] = out + (t + i) * out_stride;
        }
        rows_by_pointer(w, xs, outs, n, add, nullptr);
    }
}
