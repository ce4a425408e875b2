// Tensors as arguments: address, sizes and strides, and whether they fit. Baseline code, used by module.cpp only.
//
// torch hands tensors out through DLPack's C exchange API (torch 2.10 and later): tens of nanoseconds instead of the
// half microsecond that attributes cost. Older versions are asked for the attributes.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>

namespace edge {

namespace py = pybind11;

// The parts of dlpack.h (version 1) that are read here, by its documented layout.
namespace dlpack {
struct Device {
    int32_t device_type;
    int32_t device_id;
};
struct DataType {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};
struct Tensor {
    void* data;
    Device device;
    int32_t ndim;
    DataType dtype;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
};
struct ExchangeApi {
    uint32_t major, minor;
    ExchangeApi* previous;
    void* allocate;
    void* managed_from_object;
    void* managed_to_object;
    int (*tensor_from_object)(void* object, Tensor* out);
    void* current_work_stream;
};
constexpr int32_t CPU = 1;
}  // namespace dlpack

enum Item : int { FLOAT32 = 2, INT32 = 0, SIGNED_BYTE = 8, OTHER = -1 };  // DLPack's type codes; those of 8 bits plus 8

struct Argument {
    static constexpr int MOST = 4;
    char* data = nullptr;
    int ndim = 0;
    int item = OTHER;
    int64_t shape[MOST];
    int64_t strides[MOST];

    float* floats() const { return reinterpret_cast<float*>(data); }
    int32_t* ints() const { return reinterpret_cast<int32_t*>(data); }
    bool is_dense(Item wanted, int dimensions) const {
        if (item != wanted || ndim != dimensions) return false;
        for (int i = 0; i < ndim; ++i)
            if (shape[i] == 0) return true;
        int64_t step = 1;
        for (int i = ndim - 1; i >= 0; --i) {
            if (shape[i] > 1 && strides[i] != step) return false;
            step *= shape[i];
        }
        return true;
    }
    // float32 [T, columns] whose rows may be strided
    bool is_rows(int64_t columns) const {
        return item == FLOAT32 && ndim == 2 && shape[1] == columns && (columns <= 1 || strides[1] == 1);
    }
    // float32 [T, heads, P] whose rows and heads may be strided
    bool is_heads(int64_t T, int64_t heads, int64_t P) const {
        return item == FLOAT32 && ndim == 3 && shape[0] == T && shape[1] == heads && shape[2] == P &&
               (P <= 1 || strides[2] == 1);
    }
};

struct TorchAccess {
    PyTypeObject* tensor_type = nullptr;
    PyObject *float32 = nullptr, *int32 = nullptr, *int8 = nullptr;
    const dlpack::ExchangeApi* api = nullptr;
};
inline TorchAccess& torch_access() {
    static TorchAccess access;
    return access;
}

// Called once by the Python side; `exchange` false leaves DLPack aside, for the test that both ways agree.
inline void find_torch(py::object torch, bool exchange) {
    TorchAccess& access = torch_access();
    const py::object tensor_type = torch.attr("Tensor");
    access.tensor_type = reinterpret_cast<PyTypeObject*>(tensor_type.inc_ref().ptr());
    access.float32 = torch.attr("float32").cast<py::object>().inc_ref().ptr();
    access.int32 = torch.attr("int32").cast<py::object>().inc_ref().ptr();
    access.int8 = torch.attr("int8").cast<py::object>().inc_ref().ptr();
    access.api = nullptr;
    if (!exchange || !py::hasattr(tensor_type, "__dlpack_c_exchange_api__")) return;
    const py::object capsule = tensor_type.attr("__dlpack_c_exchange_api__");
    void* found = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
    if (!found) throw py::error_already_set();
    const auto* api = static_cast<const dlpack::ExchangeApi*>(found);
    if (api->major == 1) access.api = api;
}

// Read a tensor on the CPU of at most four dimensions; false for anything else.
inline bool read(py::handle object, Argument& argument) {
    const TorchAccess& access = torch_access();
    if (!PyObject_TypeCheck(object.ptr(), access.tensor_type)) return false;
    if (access.api) {
        dlpack::Tensor tensor;
        if (access.api->tensor_from_object(object.ptr(), &tensor) != 0) {
            PyErr_Clear();
            return false;
        }
        if (tensor.device.device_type != dlpack::CPU || tensor.ndim > Argument::MOST) return false;
        argument.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
        argument.ndim = tensor.ndim;
        const dlpack::DataType type = tensor.dtype;
        argument.item = type.lanes != 1 ? int(OTHER) : type.bits == 32 ? type.code : type.bits == 8 ? type.code + 8 : int(OTHER);
        int64_t step = 1;
        for (int i = tensor.ndim - 1; i >= 0; --i) {
            argument.shape[i] = tensor.shape[i];
            argument.strides[i] = tensor.strides ? tensor.strides[i] : step;
            step *= tensor.shape[i];
        }
        return true;
    }
    if (!object.attr("is_cpu").cast<bool>()) return false;
    const py::tuple shape = object.attr("shape"), strides = object.attr("stride")();
    if (shape.size() > Argument::MOST) return false;
    const py::object dtype = object.attr("dtype");
    argument.data = reinterpret_cast<char*>(object.attr("data_ptr")().cast<uintptr_t>());
    argument.ndim = static_cast<int>(shape.size());
    argument.item = dtype.ptr() == access.float32 ? FLOAT32
                    : dtype.ptr() == access.int32 ? INT32
                    : dtype.ptr() == access.int8  ? SIGNED_BYTE
                                                  : OTHER;
    for (int i = 0; i < argument.ndim; ++i) {
        argument.shape[i] = shape[i].cast<int64_t>();
        argument.strides[i] = strides[i].cast<int64_t>();
    }
    return true;
}

// A tensor, or None: then `argument.data` stays null.
inline bool read_optional(py::handle object, Argument& argument) { return object.is_none() || read(object, argument); }

// float32 [length], or None.
inline bool read_vector(py::handle object, Argument& argument, int64_t length) {
    return read_optional(object, argument) &&
           (object.is_none() || (argument.is_dense(FLOAT32, 1) && argument.shape[0] == length));
}

}  // namespace edge
