// What the module and the ISA units share: plain structs and one table of function pointers per ISA.
//
// Only plain data may stand here. An inline function or a template in a header that several ISA units include could be
// emitted once, with AVX-512 inside, and then run on a machine that has none.
#pragma once
#include <cstddef>
#include <cstdint>

namespace edge {

enum Format : int { BF16 = 0, F16 = 1, F32 = 2, Q8 = 3, Q4 = 4, MXFP4 = 5, BF16X2 = 6 };  // Q8, Q4: int8, int4

constexpr int64_t GROUP = 32;  // inputs that share a scale in int4 and mxfp4
// The bytes of one group of a panel: 4 times 16 dwords. A dword is eight inputs of one output: the low halves of its bytes
// the first four, the high halves the others.
constexpr int64_t GROUP_BYTES = 256;

// A weight [num_outputs, num_inputs] as panels of 16 outputs:
//   float16, float32  [K up to even][16]
//   bfloat16          [K up to even / 2][16][2], for bfloat16x2 too
//   int8              [16] float32 scales, [K up to a multiple of 4 / 4][16][4] codes plus 128
//   int4              for every 2 groups: [2][16] float16 scales, then the groups, codes plus 8
//   mxfp4             for every 4 groups: [4][16] exponents of one byte, then the groups
struct Panels {
    const char* data;
    int format;
    int64_t num_outputs;
    int64_t num_inputs;
    int64_t panel_bytes;
    int64_t skip = 0;  // bytes of values before the first input, where a view of later inputs keeps an int8 panel's scales
};

enum Activation : int { SWIGLU = 0, GEGLU_TANH = 1, CLAMPED_SWIGLU = 2, RELU = 3 };

struct Expert {
    Panels gate_up;  // gate's panels, then up's; both padded to whole panels. RELU: up's alone
    Panels down;
    int activation;
    float alpha, limit;      // of CLAMPED_SWIGLU
    const float* inner_bias;  // of gate_up, padded likewise; null if there is none
    const float* down_bias;   // up to a whole panel
};

struct KvPages {
    float* k;  // [num_blocks, G, P, 16]
    float* v;  // [num_blocks, G, 16, Pv]
    int64_t num_blocks, G, P, Pv;
};

struct AttentionCall {
    const float* q;  // [T, H, P], strides of T and H in elements
    int64_t q_stride, q_head_stride;
    KvPages pages;
    const int32_t* block_tables;  // [B, M]
    int64_t M;
    const int32_t* row_request;   // [T]
    const int32_t* row_position;  // [T]
    float scale;
    float* out;  // [T, H, Pv]
    int64_t out_stride, out_head_stride;
    int64_t T, H;
    int64_t window;      // last positions that a row sees, 0: all
    const float* sinks;  // [H] or null
    float soft_cap;      // 0: none
    const float* bias;   // [H, 2 * bias_reach + 1] by distance, or null
    int64_t bias_reach;
    const int32_t* own_position;  // [T], what distances are counted from
};

enum Scores : int { SOFTMAX = 0, SOFTMAX_OF_TOP_K = 1, SIGMOID = 2 };

struct GateCall {
    const float* logits;
    int64_t stride, T, E, k;
    bool renormalise;
    int scores;
    int64_t num_groups, top_groups;
    float scale;
    const float* expert_scale;    // [E] or null
    const float* selection_bias;  // [E] or null
    int32_t* ids;                 // [T, k]
    float* weights;               // [T, k]
    char* counts;                 // [num_blocks, E] or null
    int64_t counts_stride;        // bytes
    bool counts_are_int8;
    const int32_t *slots, *counted;  // [T]
};

struct ExpertCall {
    const float* x;
    int64_t x_stride;
    const int32_t* rows;         // [R] row of x for each routed row, in expert order
    const int32_t* out_rows;     // [R] row of out for each routed row, in expert order
    const int64_t* offsets;      // [groups + 1] where each expert's rows begin
    const Expert* const* experts;  // [groups]
    int64_t groups;
    float* out;
    int64_t out_stride;
    const int32_t* masks = nullptr;  // [R] slices of each routed row, in expert order; a group is whole or partial
    int64_t parts = 1;               // slices of an expert
};

// Neurons change places between the parts of a partition; see swaps.h.
struct SwapCall {
    const float* mass;        // [F, B], B a multiple of 16
    int64_t F, B, N;
    int dropped;              // parts that a row does without
    const int32_t* first;     // [I] neuron, and the one it changes places with
    const int32_t* second;    // [I]
    const float* tolerances;  // [I] a swap that changes the objective by less is made
    int64_t I;
    int32_t* group;           // [F] the part of each neuron, changed
    int32_t* best_group;      // [F] written
    float* loads;             // [N, B] mass of each part, changed
    float* costs;             // [2, B] scratch
    float* changes;           // [I] written: by how much each swap changes the objective
    double* objective;        // [2] written: at first, and at the best
};

// Rows of a weight become codes in its panels; see quantise.h.
struct QuantiseCall {
    const void* rows;  // [count, K] of the format `stored`, a float
    int stored;
    int64_t stride, count, K;
    int format;
    char* panels;
    int64_t panel_bytes;
    int64_t first;  // the weight's row that the first one becomes
};

struct Kernels {
    // bias [N] or null
    void (*linear)(const Panels& w, const float* x, int64_t x_stride, int64_t T, const float* bias, float* out,
                   int64_t out_stride, bool add);
    void (*rms_norm)(const float* x, int64_t x_stride, const float* weight, float eps, int64_t T, int64_t D, float* out,
                     int64_t out_stride);
    // cos and sin [S, C]
    void (*head_norm_rope)(float* x, int64_t token_stride, int64_t head_stride, int64_t T, int64_t H, int64_t P,
                           const float* weight, float eps, const float* cos, const float* sin, int64_t C,
                           bool interleaved, const int32_t* positions);
    void (*soft_cap)(float* x, int64_t stride, int64_t T, int64_t N, float cap);
    void (*paged_attention)(const AttentionCall& call);
    void (*gate_topk)(const GateCall& call);
    void (*grouped_ffn)(const ExpertCall& call);
    void (*combine)(const float* rows, int64_t stride, const int32_t* slots, const float* weights, int64_t T, int64_t K,
                    int64_t D, float* hidden, int64_t hidden_stride);
    void (*exp)(const float* x, int64_t n, float* out);  // these two for the test of their accuracy
    void (*tanh)(const float* x, int64_t n, float* out);
    bool (*finite)(const float* x, int64_t stride, int64_t T, int64_t N);  // whether all of x is
    float (*fma_turns)(int64_t turns);                   // for the roofline: 512 multiply-adds each, nothing else
    void (*swap_search)(const SwapCall& call);
    void (*expert_inner)(const ExpertCall& call);  // out [R, F]: what the neurons give
    bool (*quantise)(const QuantiseCall& call);    // false, with anything written, if a number is not finite
    // out [n, F up to whole panels]: what the neurons of n experts of one shape and format give for one row
    void (*neurons_of_row)(const Expert* const* experts, int64_t n, const float* x, float* out);
};

// x W^T for a W of codes, in whole numbers: see integer.h. `then` is what will be read next, or null. It calls the one
// that serves.
void integer_product(const Panels& w, const float* const* x, float* const* out, int64_t T, bool add, const char* then);
using IntegerProduct = decltype(&integer_product);
#if defined(__x86_64__) && defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define EDGE_HAS_AMX 1  // the compiler's assembler knows tile registers, and the system is asked for them
void integer_product_amx(const Panels&, const float* const*, float* const*, int64_t, bool, const char*);
#endif
void integer_product_vnni(const Panels&, const float* const*, float* const*, int64_t, bool, const char*);
void integer_product_avx512(const Panels&, const float* const*, float* const*, int64_t, bool, const char*);
void integer_product_avx2(const Panels&, const float* const*, float* const*, int64_t, bool, const char*);
void integer_product_portable(const Panels&, const float* const*, float* const*, int64_t, bool, const char*);

const Kernels* kernels_avx512();
const Kernels* kernels_avx2();
const Kernels* kernels_portable();

// This thread's scratch memory, one buffer per `which`, 64-byte aligned, kept until the thread ends.
enum Scratch : int { SCORES = 0, POINTERS = 1, INNER = 2, SMALL = 3, WIDE = 4, DIGITS = 5, REST = 6, TILES = 7, NUM_SCRATCH = 8 };
void* scratch(Scratch which, size_t bytes);

}  // namespace edge
