// Calls that work on rows by themselves: linear, embed, norms, rope. Used by module.cpp only.
#pragma once
#include "call.h"
#include "packed.h"
#include "parts.h"

namespace edge {

inline bool call_linear(py::handle x_, const PackedPanels& w, py::handle bias_, py::handle out_, bool add) {
    Argument x, bias, out;
    const int64_t K = w.view().num_inputs, N = w.view().num_outputs;
    if (!read(x_, x) || !read(out_, out) || !x.is_rows(K) || !out.is_rows(N) || x.shape[0] != out.shape[0] ||
        !read_vector(bias_, bias, N))
        return false;
    py::gil_scoped_release release;
    const Spending spending(DENSE);
    linear_in_parts(kernels(), w.view(), x.floats(), x.strides[0], x.shape[0], bias.floats(), out.floats(), out.strides[0],
                    add);
    return true;
}

inline bool call_linear_heads(py::handle x_, const PackedHeads& heads, py::handle out_) {
    Argument x, out;
    const int64_t H = static_cast<int64_t>(heads.views().size());
    const Panels& first = heads.views()[0];
    if (!read(x_, x) || !read(out_, out) || x.ndim != 3 || !x.is_heads(x.shape[0], H, first.num_inputs) ||
        !out.is_heads(x.shape[0], H, first.num_outputs))
        return false;
    py::gil_scoped_release release;
    const Spending spending(DENSE);
    heads_in_parts(kernels(), heads.views(), x.floats(), x.strides[0], x.strides[1], x.shape[0], out.floats(),
                   out.strides[0], out.strides[1]);
    return true;
}

inline bool call_embed(py::handle ids_, const PackedPanels& w, py::handle out_) {
    Argument ids, out;
    if (!read(ids_, ids) || !read(out_, out) || !ids.is_dense(INT32, 1) || !out.is_rows(w.view().num_inputs) ||
        ids.shape[0] != out.shape[0])
        return false;
    check_range("token_ids", ids.ints(), ids.shape[0], 0, w.view().num_outputs);
    py::gil_scoped_release release;
    const Spending spending(DENSE);
    for (int64_t t = 0; t < ids.shape[0]; ++t) w.widen_row(ids.ints()[t], out.floats() + t * out.strides[0]);
    return true;
}

inline bool call_rms_norm(py::handle x_, py::handle weight_, float eps, py::handle out_) {
    Argument x, weight, out;
    if (!read(x_, x) || !read(out_, out) || x.ndim != 2) return false;
    const int64_t D = x.shape[1];
    if (!read_vector(weight_, weight, D) || !x.is_rows(D) || !out.is_rows(D) || x.shape[0] != out.shape[0]) return false;
    py::gil_scoped_release release;
    const Spending spending(DENSE);
    kernels().rms_norm(x.floats(), x.strides[0], weight.floats(), eps, x.shape[0], D, out.floats(), out.strides[0]);
    return true;
}

inline bool call_head_norm_rope(py::handle x_, py::handle weight_, float eps, py::handle cos_, py::handle sin_,
                         py::handle positions_, bool interleaved) {
    Argument x, weight, cos, sin, positions;
    if (!read(x_, x) || !read(cos_, cos) || !read(sin_, sin) || !read(positions_, positions) || x.ndim != 3) return false;
    const int64_t T = x.shape[0], H = x.shape[1], P = x.shape[2];
    if (!x.is_heads(T, H, P) || !read_vector(weight_, weight, P) || !cos.is_dense(FLOAT32, 2) ||
        !sin.is_dense(FLOAT32, 2) || !positions.is_dense(INT32, 1) || positions.shape[0] != T)
        return false;
    const int64_t S = cos.shape[0], C = cos.shape[1];
    if (2 * C > P || sin.shape[0] != S || sin.shape[1] != C) return false;
    check_range("positions", positions.ints(), T, 0, S);
    py::gil_scoped_release release;
    const Spending spending(DENSE);
    kernels().head_norm_rope(x.floats(), x.strides[0], x.strides[1], T, H, P, weight.floats(), eps, cos.floats(),
                           sin.floats(), C, interleaved, positions.ints());
    return true;
}

inline bool call_soft_cap(py::handle x_, float cap) {
    Argument x;
    if (!read(x_, x) || x.ndim != 2 || !x.is_rows(x.shape[1]) || !(cap > 0)) return false;
    py::gil_scoped_release release;
    const Spending spending(DENSE);
    kernels().soft_cap(x.floats(), x.strides[0], x.shape[0], x.shape[1], cap);
    return true;
}

}  // namespace edge
