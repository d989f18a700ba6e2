// The part of ONNX Runtime's C interface that a custom operator needs, declared here so that its headers are not required.
//
// The interface is a table of functions that only ever grows: a function keeps its place, and a library asks for the
// version of the table that it was written for. Version 17 is that of ONNX Runtime 1.17.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(_WIN32)
#define ORT_CALL __stdcall
#else
#define ORT_CALL
#endif

namespace ort {

constexpr uint32_t version = 17;

struct Opaque;  // a status, value, kernel or context: used only by its address
using Status = Opaque*;

struct Base {
  const void* const*(ORT_CALL* table)(uint32_t version);
  const char*(ORT_CALL* version_string)();
};

// Places in the table.
enum Place {
  create_status = 0,
  create_custom_op_domain = 26,
  custom_op_domain_add = 27,
  add_custom_op_domain = 28,
  get_tensor_mutable_data = 51,
  get_tensor_element_type = 60,
  get_dimensions_count = 61,
  get_dimensions = 62,
  get_tensor_type_and_shape = 65,
  kernel_info_get_attribute_int64 = 86,
  kernel_context_get_input = 90,
  kernel_context_get_output = 91,
  release_status = 93,
  release_tensor_type_and_shape = 99,
  kernel_info_get_constant_input = 249,
  kernel_context_parallel_for = 274,
};

enum ElementType { type_undefined = 0, type_float = 1, type_float16 = 10 };
enum Characteristic { input_required = 0, input_optional = 1 };
enum ErrorCode { error_fail = 1, error_invalid_argument = 2 };

struct CustomOp {
  uint32_t version;
  void*(ORT_CALL* create_kernel)(const CustomOp*, const void* const* table, const Opaque* info);
  const char*(ORT_CALL* name)(const CustomOp*);
  const char*(ORT_CALL* provider)(const CustomOp*);
  int(ORT_CALL* input_type)(const CustomOp*, size_t index);
  size_t(ORT_CALL* inputs)(const CustomOp*);
  int(ORT_CALL* output_type)(const CustomOp*, size_t index);
  size_t(ORT_CALL* outputs)(const CustomOp*);
  void(ORT_CALL* compute)(void* kernel, Opaque* context);
  void(ORT_CALL* destroy)(void* kernel);
  int(ORT_CALL* input_characteristic)(const CustomOp*, size_t index);
  int(ORT_CALL* output_characteristic)(const CustomOp*, size_t index);
  int(ORT_CALL* input_memory)(const CustomOp*, size_t index);
  int(ORT_CALL* variadic[4])(const CustomOp*);
  Status(ORT_CALL* create_kernel_status)(const CustomOp*, const void* const* table, const Opaque* info, void** kernel);
  Status(ORT_CALL* compute_status)(void* kernel, Opaque* context);
  Status(ORT_CALL* infer_shape)(const CustomOp*, Opaque* context);
  int(ORT_CALL* start_version)(const CustomOp*);
  int(ORT_CALL* end_version)(const CustomOp*);
  void* in_place[4];
};

}  // namespace ort
