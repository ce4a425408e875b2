// What the calls from Python share: values that point nowhere are errors, and the kernels that serve. Used by module.cpp only.
#pragma once
#include <string>

#include "arguments.h"
#include "isa.h"
#include "spent.h"


namespace edge {

using Address = uintptr_t;
template <class T>
inline T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

// The instruction set that serves, best first at the start.
inline const Isa*& serving() {
    static const Isa* isa = find_isa(runnable_isas().front());
    return isa;
}
inline const Kernels& kernels() { return *serving()->kernels(); }

inline std::string text(int64_t n) { return std::to_string(n); }

// First index whose value is outside [low, high), or -1.
inline int64_t outside(const int32_t* values, int64_t count, int64_t low, int64_t high) {
    for (int64_t i = 0; i < count; ++i)
        if (values[i] < low || values[i] >= high) return i;
    return -1;
}

inline void check_range(const char* name, const int32_t* values, int64_t count, int64_t low, int64_t high) {
    const int64_t i = outside(values, count, low, high);
    if (i >= 0)
        throw py::value_error(std::string(name) + ": entry " + text(i) + " is " + text(values[i]) + ", expected " +
                              text(low) + " to " + text(high - 1));
}

}  // namespace edge
