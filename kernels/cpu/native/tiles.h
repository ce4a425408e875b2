// How work is cut into tiles, and what a finished tile leaves behind. Included behind lanes.h.

// The part-th of `parts` nearly equal parts of [0, n): where it begins.
inline int64_t part_begin(int64_t n, int64_t parts, int64_t part) { return n * part / parts; }
inline int64_t parts_of(int64_t n, int64_t most) { return (n + most - 1) / most; }
inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

inline V load_lanes(const float* p, int64_t lanes) { return lanes >= 16 ? load(p) : load_part(p, (int)lanes); }
inline void store_lanes(float* p, V v, int64_t lanes) {
    if (lanes >= 16)
        store(p, v);
    else
        store_part(p, v, (int)lanes);
}

// A finished dot of up to 16 outputs on its way out.
inline void put(float* out, V dot, int lanes, bool add_out) {
    if (lanes == 16)
        store(out, add_out ? add(load(out), dot) : dot);
    else
        store_part(out, add_out ? add(load_part(out, lanes), dot) : dot, lanes);
}
