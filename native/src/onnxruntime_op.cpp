// A custom operator for ONNX Runtime: lowrank::Strips(x, weight, bias[, weight, bias]) with the attributes relu and pool.
//
// A weight of [filters, channels, 1, 3] looks across, one of [filters, channels, 3, 1] down; weights and biases are
// constants. The results of two weights are concatenated along the channels. With pool=1
// the largest of each 2x2 results is kept, and a last row or column without a partner dropped; pool=2 keeps it. Work runs on the session's threads.
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "onnxruntime_abi.h"
#include "strips.h"

namespace {

// The table of functions with their types; a status is an exception.
struct Api {
  const void* const* table;

  template <class... A>
  void operator()(ort::Place place, A... arguments) const {
    using Function = ort::Status(ORT_CALL*)(A...);
    ort::Status status = reinterpret_cast<Function>(const_cast<void*>(table[place]))(arguments...);
    if (!status) return;
    reinterpret_cast<void(ORT_CALL*)(ort::Status)>(const_cast<void*>(table[ort::release_status]))(status);
    throw std::runtime_error("onnxruntime refused a call of lowrank::Strips");
  }

  ort::Status failed(const char* message) const {
    using Create = ort::Status(ORT_CALL*)(ort::ErrorCode, const char*);
    return reinterpret_cast<Create>(const_cast<void*>(table[ort::create_status]))(ort::error_invalid_argument, message);
  }

  template <class F>
  ort::Status guarded(F work) const {
    try {
      work();
      return nullptr;
    } catch (const std::exception& error) {
      return failed(error.what());
    }
  }
};

struct Tensor {
  int type = 0;
  std::vector<int64_t> shape;
  void* data = nullptr;

  static Tensor of(const Api& api, const ort::Opaque* value) {
    Tensor found;
    ort::Opaque* info = nullptr;
    size_t count = 0;
    api(ort::get_tensor_type_and_shape, value, &info);
    api(ort::get_tensor_element_type, static_cast<const ort::Opaque*>(info), &found.type);
    api(ort::get_dimensions_count, static_cast<const ort::Opaque*>(info), &count);
    found.shape.resize(count);
    api(ort::get_dimensions, static_cast<const ort::Opaque*>(info), found.shape.data(), count);
    using Release = void(ORT_CALL*)(ort::Opaque*);
    reinterpret_cast<Release>(const_cast<void*>(api.table[ort::release_tensor_type_and_shape]))(info);
    api(ort::get_tensor_mutable_data, const_cast<ort::Opaque*>(value), &found.data);
    return found;
  }
};

struct Op : ort::CustomOp {
  strips::Type type;
};

struct Group {
  strips::Axis axis;
  int filters;
  std::vector<char> packed, bias;
};

struct Kernel {
  Api api;
  strips::Type type;
  int step, channels = 0, filters = 0;
  bool relu;
  int pool;  // 0: none, 1: floor, 2: ceil
  std::vector<Group> groups;

  Kernel(Api given, strips::Type of, const ort::Opaque* info) : api(given), type(of), step(of == strips::Type::half ? 4 : 6) {
    relu = attribute(info, "relu") != 0, pool = attribute(info, "pool");
    for (size_t input = 1; input < 5; input += 2) {
      const ort::Opaque *weight = constant(info, input), *bias = constant(info, input + 1);
      if (weight && bias) add(Tensor::of(api, weight), Tensor::of(api, bias));
    }
    if (groups.empty()) throw std::invalid_argument("the weights and biases of lowrank::Strips are constants of the graph");
  }

  int attribute(const ort::Opaque* info, const char* name) const {
    int64_t value = 0;
    api(ort::kernel_info_get_attribute_int64, info, name, &value);
    return int(value);
  }

  const ort::Opaque* constant(const ort::Opaque* info, size_t input) const {
    int is_constant = 0;
    const ort::Opaque* value = nullptr;
    try {
      api(ort::kernel_info_get_constant_input, info, input, &is_constant, &value);
    } catch (const std::exception&) {
      return nullptr;  // there are fewer inputs
    }
    return is_constant ? value : nullptr;
  }

  void add(const Tensor& weight, const Tensor& bias) {
    const auto& shape = weight.shape;
    bool across = shape.size() == 4 && shape[2] == 1 && shape[3] == 3, down = shape.size() == 4 && shape[2] == 3 && shape[3] == 1;
    if (!(across || down) || bias.shape != std::vector<int64_t>{shape[0]} || (channels && channels != shape[1]))
      throw std::invalid_argument("lowrank::Strips takes weights of [filters, channels, 1, 3] or [filters, channels, 3, 1]");
    channels = int(shape[1]);
    Group made{across ? strips::Axis::across : strips::Axis::down, int(shape[0]), {}, {}};
    size_t bytes = type == strips::Type::half ? 2 : 4;
    made.packed.resize(strips::packed_size(type, step, made.filters, channels) * bytes);
    strips::pack(type, step, made.filters, channels, weight.data, made.packed.data());
    const char* from = static_cast<const char*>(bias.data);
    made.bias.assign(from, from + made.filters * bytes);
    filters += made.filters;
    groups.push_back(std::move(made));
  }

  void compute(ort::Opaque* context) const {
    const ort::Opaque* value = nullptr;
    api(ort::kernel_context_get_input, static_cast<const ort::Opaque*>(context), size_t(0), &value);
    Tensor x = Tensor::of(api, value);
    if (x.shape.size() != 4 || x.shape[1] != channels) throw std::invalid_argument("lowrank::Strips got maps of another shape");
    int64_t by = pool ? 2 : 1, more = pool == 2 ? 1 : 0, height = x.shape[2], width = x.shape[3];
    std::vector<int64_t> shape = {x.shape[0], filters, (height + more) / by, (width + more) / by};
    ort::Opaque* output = nullptr;
    void* y = nullptr;
    api(ort::kernel_context_get_output, context, size_t(0), static_cast<const int64_t*>(shape.data()), shape.size(), &output);
    api(ort::get_tensor_mutable_data, output, &y);
    bool odd = pool && (height % 2 || width % 2);  // then the results are pooled after the kernel
    size_t area = odd ? height * width : shape[2] * shape[3], bytes = type == strips::Type::half ? 2 : 4;
    std::vector<char> whole(odd ? shape[0] * filters * area * bytes : 0);
    char* to = odd ? whole.data() : static_cast<char*>(y);
    for (const Group& group : groups) {
      strips::Strip strip{type, group.axis, step, int(shape[0]), channels, int(height), int(width), group.filters, x.data,
                          group.packed.data(), group.bias.data(), to, ptrdiff_t(filters * area), relu, pool && !odd};
      strips::run(strip, threads(), [&](int items, const std::function<void(int)>& body) { spread(context, items, body); });
      to += group.filters * area * bytes;
    }
    if (odd) strips::pool_odd(type, int(shape[0] * filters), int(height), int(width), pool == 2, whole.data(), y);
  }

  static int threads() { return std::max(1u, std::thread::hardware_concurrency()); }

  void spread(ort::Opaque* context, int items, const std::function<void(int)>& body) const {
    if (items == 1) return body(0);
    void (*work)(void*, size_t) = [](void* data, size_t item) { (*static_cast<const std::function<void(int)>*>(data))(int(item)); };
    api(ort::kernel_context_parallel_for, static_cast<const ort::Opaque*>(context), work, size_t(items), size_t(0),
        static_cast<void*>(const_cast<std::function<void(int)>*>(&body)));
  }
};

Op op_for(strips::Type type) {
  Op op{};
  op.version = ort::version;
  op.type = type;
  op.name = [](const ort::CustomOp*) { return "Strips"; };
  op.provider = [](const ort::CustomOp*) { return "CPUExecutionProvider"; };
  op.inputs = [](const ort::CustomOp*) -> size_t { return 5; };
  op.outputs = [](const ort::CustomOp*) -> size_t { return 1; };
  op.input_type = [](const ort::CustomOp* o, size_t) -> int {
    return static_cast<const Op*>(o)->type == strips::Type::half ? ort::type_float16 : ort::type_float;
  };
  op.output_type = op.input_type;
  op.input_characteristic = [](const ort::CustomOp*, size_t i) -> int { return i < 3 ? ort::input_required : ort::input_optional; };
  op.output_characteristic = [](const ort::CustomOp*, size_t) -> int { return ort::input_required; };
  op.input_memory = [](const ort::CustomOp*, size_t) { return 0; };
  for (auto& unused : op.variadic) unused = [](const ort::CustomOp*) { return 1; };
  op.create_kernel_status = [](const ort::CustomOp* o, const void* const* table, const ort::Opaque* info, void** kernel) {
    Api api{table};
    return api.guarded([&] { *kernel = new Kernel(api, static_cast<const Op*>(o)->type, info); });
  };
  op.compute_status = [](void* kernel, ort::Opaque* context) {
    auto* made = static_cast<Kernel*>(kernel);
    return made->api.guarded([&] { made->compute(context); });
  };
  op.destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.start_version = [](const ort::CustomOp*) { return 1; };
  op.end_version = [](const ort::CustomOp*) { return 1000; };
  return op;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) ort::Status ORT_CALL RegisterCustomOps(ort::Opaque* options, const ort::Base* base) {
  static const Op single = op_for(strips::Type::single), half = op_for(strips::Type::half);
  Api api{base->table(ort::version)};
  if (!api.table) return nullptr;  // older than this operator: the session will say that it lacks it
  return api.guarded([&] {
    ort::Opaque* domain = nullptr;
    api(ort::create_custom_op_domain, "lowrank", &domain);
    api(ort::custom_op_domain_add, domain, static_cast<const ort::CustomOp*>(&single));
    if (strips::has(strips::Type::half)) api(ort::custom_op_domain_add, domain, static_cast<const ort::CustomOp*>(&half));
    api(ort::add_custom_op_domain, options, domain);
  });
}
