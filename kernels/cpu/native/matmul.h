// Dot products as one chain of fused multiply-adds per output, in increasing k, from 0. Included by an ISA unit inside
// its own anonymous namespace.
//
// The lanes are outputs, so how rows and panels are tiled never changes a bit; only speed hangs on the tile sizes.

// A format tells how its panels are read. Plain ones give two inputs of 16 outputs at a time.
struct Plain {
    static constexpr bool GROUPED = false;
    static constexpr int HEADER = 0;  // bytes of a panel before its values
    static inline V finish(V dot, const char*) { return dot; }
};
struct Bf16Weights : Plain {
    static constexpr int PAIR_BYTES = 64;
    static inline V even(const char* p) { return bf16_even(p); }
    static inline V odd(const char* p) { return bf16_odd(p); }
};
struct F16Weights : Plain {
    static constexpr int PAIR_BYTES = 64;
    static inline V even(const char* p) { return f16_lanes(p); }
    static inline V odd(const char* p) { return f16_lanes(p + 32); }
};
struct F32Weights : Plain {
    static constexpr int PAIR_BYTES = 128;
    static inline V even(const char* p) { return load((const float*)p); }
    static inline V odd(const char* p) { return load((const float*)(p + 64)); }
};
// The chain runs over the codes; the finished dot is scaled.
struct Int8Weights : Plain {
    static constexpr int PAIR_BYTES = 32, HEADER = 64;
    static inline V even(const char* p) { return int8_lanes(p); }
    static inline V odd(const char* p) { return int8_lanes(p + 16); }
    static inline V finish(V dot, const char* panel) { return mul(dot, load((const float*)panel)); }
};
// Grouped ones give eight inputs of 16 outputs at a time. A chain over the codes of each group, from 0; its end times the
// group's scale goes into the chain over groups.
struct Int4Weights {
    static constexpr bool GROUPED = true;
    static constexpr int SCALE_BYTES = 32, PER_LINE = 2;
    template <int C>
    static inline V code(const char* p) { return int4_lanes<C>(p); }
    static inline V scale(const char* p) { return f16_lanes(p); }
};
struct Mxfp4Weights {
    static constexpr bool GROUPED = true;
    static constexpr int SCALE_BYTES = 16, PER_LINE = 4;
    template <int C>
    static inline V code(const char* p) { return e2m1_lanes<C>(p); }
    static inline V scale(const char* p) { return e8m0_lanes(p); }
};
template <class W>
inline int64_t scale_at(int64_t g) {
    return g / W::PER_LINE * (64 + W::PER_LINE * GROUP_BYTES) + g % W::PER_LINE * W::SCALE_BYTES;
}
template <class W>
inline int64_t codes_at(int64_t g) {
    return (g / W::PER_LINE + 1) * 64 + g * GROUP_BYTES;
}

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

// A finished dot of up to 16 outputs on its way out.
inline void put(float* out, V dot, int lanes, bool add_out) {
    if (lanes == 16)
        store(out, add_out ? add(load(out), dot) : dot);
    else
        store_part(out, add_out ? add(load_part(out, lanes), dot) : dot, lanes);
}

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
    for (int j = 0; j < PANELS; ++j) w[j] = tile.w[j] + W::HEADER;
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < PANELS; ++j) acc[i][j] = zero();

    const int64_t pairs = tile.K / 2, ahead = tile.ahead;
    for (int64_t pair = 0; pair < pairs; ++pair) {
        V b[PANELS];
        // The next group of panels on its way to the second-level cache; one row alone reads faster without.
        if constexpr (ROWS >= 2) {
#pragma GCC unroll 8
            for (int j = 0; j < PANELS; ++j) __builtin_prefetch(w[j] + pair * W::PAIR_BYTES + ahead, 0, 2);
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
        for (int j = 0; j < PANELS; ++j) put<PANELS>(tile, i, j, W::finish(acc[i][j], tile.w[j]));
}

template <class W, int C, int ROWS, int PANELS>
inline void code_step(V (&part)[ROWS][PANELS], const char* const (&w)[PANELS], int64_t at, const float* const (&x)[ROWS],
                      int64_t k) {
    V b[PANELS];
#pragma GCC unroll 8
    for (int j = 0; j < PANELS; ++j) b[j] = W::template code<C>(w[j] + at);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
        V a = set1(x[i][k + C]);
#pragma GCC unroll 8
        for (int j = 0; j < PANELS; ++j) part[i][j] = fma(a, b[j], part[i][j]);
    }
}

template <class W, int ROWS, int PANELS>
__attribute__((noinline)) void grouped_tile(const Tile& tile) {
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

    const int64_t K = tile.K, ahead = tile.ahead;
    for (int64_t g = 0; g * GROUP < K; ++g) {
        V part[ROWS][PANELS];
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
            for (int j = 0; j < PANELS; ++j) part[i][j] = zero();
        int64_t at = codes_at<W>(g), k = g * GROUP;
        const int64_t end = k + GROUP < K ? k + GROUP : K;
        for (; k + 8 <= end; k += 8, at += 64) {
            if constexpr (ROWS >= 2) {
#pragma GCC unroll 8
                for (int j = 0; j < PANELS; ++j) __builtin_prefetch(w[j] + at + ahead, 0, 2);
            }
            code_step<W, 0>(part, w, at, x, k);
            code_step<W, 1>(part, w, at, x, k);
            code_step<W, 2>(part, w, at, x, k);
            code_step<W, 3>(part, w, at, x, k);
            code_step<W, 4>(part, w, at, x, k);
            code_step<W, 5>(part, w, at, x, k);
            code_step<W, 6>(part, w, at, x, k);
            code_step<W, 7>(part, w, at, x, k);
        }
        if (k < end) {  // the last columns of a width that 8 does not divide
            code_step<W, 0>(part, w, at, x, k);
            if (k + 1 < end) code_step<W, 1>(part, w, at, x, k);
            if (k + 2 < end) code_step<W, 2>(part, w, at, x, k);
            if (k + 3 < end) code_step<W, 3>(part, w, at, x, k);
            if (k + 4 < end) code_step<W, 4>(part, w, at, x, k);
            if (k + 5 < end) code_step<W, 5>(part, w, at, x, k);
            if (k + 6 < end) code_step<W, 6>(part, w, at, x, k);
        }
#pragma GCC unroll 8
        for (int j = 0; j < PANELS; ++j) {
            const V scale = W::scale(w[j] + scale_at<W>(g));
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; ++i) acc[i][j] = fma(scale, part[i][j], acc[i][j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < PANELS; ++j) put<PANELS>(tile, i, j, acc[i][j]);
}

template <class W, int ROWS, int PANELS>
inline void any_tile(const Tile& tile) {
    if constexpr (W::GROUPED)
        grouped_tile<W, ROWS, PANELS>(tile);
    else
        dot_tile<W, ROWS, PANELS>(tile);
}

template <class W, int ROWS>
void dot_rows(int panels, const Tile& tile) {
    constexpr int MOST = panels_for(ROWS);
    switch (panels) {
        case 1: any_tile<W, ROWS, 1>(tile); break;
        case 2: if constexpr (MOST >= 2) any_tile<W, ROWS, 2>(tile); break;
        case 3: if constexpr (MOST >= 3) any_tile<W, ROWS, 3>(tile); break;
        case 4: if constexpr (MOST >= 4) any_tile<W, ROWS, 4>(tile); break;
        case 5: if constexpr (MOST >= 5) any_tile<W, ROWS, 5>(tile); break;
        case 6: if constexpr (MOST >= 6) any_tile<W, ROWS, 6>(tile); break;
        case 7: if constexpr (MOST >= 7) any_tile<W, ROWS, 7>(tile); break;
        case 8: if constexpr (MOST >= 8) any_tile<W, ROWS, 8>(tile); break;
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

// The part-th of `parts` nearly equal parts of [0, n): where it begins.
inline int64_t part_begin(int64_t n, int64_t parts, int64_t part) { return n * part / parts; }
inline int64_t parts_of(int64_t n, int64_t most) { return (n + most - 1) / most; }
inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

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

// Many rows: a block of panels is widened once, into the first-level cache, and all tiles of rows read it there. The
// chains go on from block to block in `acc`, so the sums are those of the tiles above.
constexpr int64_t WIDE_K = 128;  // inputs a block; 3 panels of them are 24 KB
constexpr int64_t WIDE_ROWS = 32;  // at 16 rows the widening costs as much as it saves, on a Xeon of 2023

struct WideTile {
    const float* x[MAX_ROWS];  // from the block's first input on
    const float* w;            // [PANELS][WIDE_K][16]
    const float* scales;       // [PANELS][WIDE_K / GROUP][16] of grouped formats
    float* acc;                // [ROWS][PANELS][16]
    int64_t count;             // inputs of this block
};

template <bool GROUPED, int ROWS, int PANELS>
__attribute__((noinline)) void wide_tile(const WideTile& tile) {
    const float* x[ROWS];
    V acc[ROWS][PANELS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) x[i] = tile.x[i];
    const int64_t step = GROUPED ? GROUP : WIDE_K;
    for (int64_t begin = 0; begin < tile.count; begin += step) {
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
            for (int j = 0; j < PANELS; ++j) acc[i][j] = GROUPED ? zero() : load(tile.acc + (i * PANELS + j) * 16);
        const int64_t end = begin + step < tile.count ? begin + step : tile.count;
        const float* w = tile.w + begin * 16;
        for (int64_t k = begin; k < end; ++k, w += 16) {
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
            for (int j = 0; j < PANELS; ++j) {
                float* to = tile.acc + (i * PANELS + j) * 16;
                const float* scale = tile.scales + (j * (WIDE_K / GROUP) + begin / GROUP) * 16;
                store(to, GROUPED ? fma(load(scale), acc[i][j], load(to)) : acc[i][j]);
            }
    }
}

template <bool GROUPED, int ROWS>
void wide_rows(int panels, const WideTile& tile) {
    constexpr int MOST = panels_for(ROWS);
    switch (panels) {
        case 1: wide_tile<GROUPED, ROWS, 1>(tile); break;
        case 2: if constexpr (MOST >= 2) wide_tile<GROUPED, ROWS, 2>(tile); break;
        case 3: if constexpr (MOST >= 3) wide_tile<GROUPED, ROWS, 3>(tile); break;
        case 4: if constexpr (MOST >= 4) wide_tile<GROUPED, ROWS, 4>(tile); break;
        case 5: if constexpr (MOST >= 5) wide_tile<GROUPED, ROWS, 5>(tile); break;
    }
}

// Nearly equal tiles of WIDE_ROWS rows or more are never as small as half of MAX_ROWS.
template <bool GROUPED>
void wide_any(int rows, int panels, const WideTile& tile) {
    switch (rows) {
        case 3: if constexpr (MAX_ROWS == 4) wide_rows<GROUPED, 3>(panels, tile); break;
        case 4: if constexpr (MAX_ROWS <= 6) wide_rows<GROUPED, 4>(panels, tile); break;
        case 5: if constexpr (MAX_ROWS >= 5) wide_rows<GROUPED, 5>(panels, tile); break;
        case 6: if constexpr (MAX_ROWS >= 6) wide_rows<GROUPED, 6>(panels, tile); break;
        case 7: if constexpr (MAX_ROWS >= 7) wide_rows<GROUPED, 7>(panels, tile); break;
        case 8: if constexpr (MAX_ROWS >= 8) wide_rows<GROUPED, 8>(panels, tile); break;
    }
}

// Inputs [k, k + count) of a panel as float32 [count][16], and the scales of their groups; k is a multiple of WIDE_K.
template <class W>
void widen(const char* panel, int64_t k, int64_t count, float* to, float* scales) {
    if constexpr (W::GROUPED) {
        for (int64_t g = k / GROUP; g * GROUP < k + count; ++g, to += GROUP * 16, scales += 16) {
            const char* from = panel + codes_at<W>(g);
            store(scales, W::scale(panel + scale_at<W>(g)));
            for (int64_t c = 0; c < GROUP / 8; ++c, from += 64) {
                float* eight = to + c * 8 * 16;
                store(eight, W::template code<0>(from));
                store(eight + 16, W::template code<1>(from));
                store(eight + 32, W::template code<2>(from));
                store(eight + 48, W::template code<3>(from));
                store(eight + 64, W::template code<4>(from));
                store(eight + 80, W::template code<5>(from));
                store(eight + 96, W::template code<6>(from));
                store(eight + 112, W::template code<7>(from));
            }
        }
    } else {
        const char* from = panel + W::HEADER + k / 2 * W::PAIR_BYTES;
        for (int64_t pair = 0; pair < (count + 1) / 2; ++pair, from += W::PAIR_BYTES) {
            store(to + pair * 32, W::even(from));
            store(to + pair * 32 + 16, W::odd(from));
        }
    }
}

template <class W>
void dot_many_rows(const Panels& w, const float* const* x, float* const* out, int64_t T, bool add_out) {
    const int64_t panels = parts_of(w.num_outputs, 16), K = w.num_inputs;
    const int64_t row_tiles = parts_of(T, MAX_ROWS);
    const int64_t widest = panels_for((int)parts_of(T, row_tiles));
    const int64_t groups = parts_of(panels, widest);
    float* wide = (float*)scratch(WIDE, (size_t)(widest * (WIDE_K + WIDE_K / GROUP + T) * 64));
    float* scales = wide + widest * WIDE_K * 16;
    float* acc = scales + widest * (WIDE_K / GROUP) * 16;
    WideTile tile;
    tile.w = wide;
    tile.scales = scales;
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t p0 = part_begin(panels, groups, g), n = part_begin(panels, groups, g + 1) - p0;
        const char* data = w.data + p0 * w.panel_bytes;
        __builtin_memset(acc, 0, (size_t)(T * n * 64));
        for (int64_t k = 0; k < K; k += WIDE_K) {
            tile.count = at_most(WIDE_K, K - k);
            for (int64_t j = 0; j < n; ++j)
                widen<W>(data + j * w.panel_bytes, k, tile.count, wide + j * WIDE_K * 16,
                         scales + j * (WIDE_K / GROUP) * 16);
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
                wide_any<W::GROUPED>((int)(r1 - r0), (int)n, tile);
                if (!last) continue;
                for (int64_t r = r0; r < r1; ++r)
                    for (int64_t j = 0; j < n; ++j) {
                        V dot = load(acc + (r * n + j) * 16);
                        if constexpr (!W::GROUPED) dot = W::finish(dot, data + j * w.panel_bytes);
                        put(out[r] + 16 * (p0 + j), dot, (int)at_most(16, w.num_outputs - 16 * (p0 + j)), add_out);
                    }
            }
        }
    }
}

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
        case Q8: dot_format<Int8Weights>(w, x, out, T, add, then); break;
        case Q4: dot_format<Int4Weights>(w, x, out, T, add, then); break;
        case MXFP4: dot_format<Mxfp4Weights>(w, x, out, T, add, then); break;
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
