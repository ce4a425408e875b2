// Which instruction set serves. Baseline code, used by module.cpp only.
#pragma once
#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "table.h"

#if defined(EDGE_HAS_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace edge {

struct Isa {
    const char* name;
    const Kernels* (*kernels)();
    IntegerProduct integer_product;
    bool (*runs)();
};

#if defined(__x86_64__)
inline bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
inline bool has_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
#endif

#if defined(EDGE_HAS_AMX)
// Linux lets a process use tile registers once it has asked; a kernel, a container or a machine may refuse.
inline bool has_amx() {
    constexpr unsigned NEEDED = 1u << 22 | 1u << 24 | 1u << 25;  // products of bfloat16, tiles, products of int8
    constexpr long ASK = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a, b, c, d;
    if (!has_vnni() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || (~d & NEEDED) != 0) return false;
    return syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
}
#endif

inline const std::vector<Isa>& isas() {  // best first
    static const std::vector<Isa> all = {
#if defined(EDGE_HAS_AMX)
        {"amx", kernels_avx512, integer_product_amx, has_amx},
#endif
#if defined(__x86_64__)
        {"avx512vnni", kernels_avx512, integer_product_vnni, has_vnni},
        {"avx512", kernels_avx512, integer_product_avx512, has_avx512},
        {"avx2", kernels_avx2, integer_product_avx2,
         [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
#endif
        {"portable", kernels_portable, integer_product_portable, [] { return true; }},
    };
    return all;
}

inline std::vector<std::string> runnable_isas() {
    std::vector<std::string> names;
    for (const Isa& isa : isas())
        if (isa.runs()) names.push_back(isa.name);
    return names;
}

inline const Isa* find_isa(const std::string& name) {
    for (const Isa& isa : isas())
        if (isa.name == name && isa.runs()) return &isa;
    throw std::invalid_argument("isa: this machine cannot run '" + name + "'");
}

}  // namespace edge
