// The call that searches a partition of neurons by swaps. Used by module.cpp only.
#pragma once
#include "call.h"

namespace edge {

// (objective at first, objective at the best), or None when an argument does not fit; see kernels/reference/swap_search.py.
inline py::object call_swap_search(py::handle mass_, py::handle first_, py::handle second_, py::handle tolerances_,
                            py::handle group_, py::handle best_group_, py::handle loads_, py::handle costs_,
                            py::handle changes_, int dropped) {
    Argument mass, first, second, tolerances, group, best_group, loads, costs, changes;
    if (!read(mass_, mass) || !read(first_, first) || !read(second_, second) || !read(tolerances_, tolerances) ||
        !read(group_, group) || !read(best_group_, best_group) || !read(loads_, loads) || !read(costs_, costs) ||
        !read(changes_, changes) || !mass.is_dense(FLOAT32, 2) || !loads.is_dense(FLOAT32, 2) ||
        !costs.is_dense(FLOAT32, 2))
        return py::none();
    const int64_t F = mass.shape[0], B = mass.shape[1], N = loads.shape[0], I = first.ndim == 1 ? first.shape[0] : 0;
    const auto is_list = [](const Argument& a, Item item, int64_t n) { return a.is_dense(item, 1) && a.shape[0] == n; };
    if (B % 16 || N < 2 || N > 8 || dropped < 1 || dropped >= N || loads.shape[1] != B || costs.shape[0] != 2 ||
        costs.shape[1] != B || !is_list(first, INT32, I) || !is_list(second, INT32, I) ||
        !is_list(tolerances, FLOAT32, I) || !is_list(changes, FLOAT32, I) || !is_list(group, INT32, F) ||
        !is_list(best_group, INT32, F))
        return py::none();
    check_range("first", first.ints(), I, 0, F);
    check_range("second", second.ints(), I, 0, F);
    check_range("group", group.ints(), F, 0, N);
    double objective[2];
    {
        py::gil_scoped_release release;
        kernels().swap_search({mass.floats(), F, B, N, dropped, first.ints(), second.ints(), tolerances.floats(), I,
                             group.ints(), best_group.ints(), loads.floats(), costs.floats(), changes.floats(),
                             objective});
    }
    return py::make_tuple(objective[0], objective[1]);
}

}  // namespace edge
