// The glue between kernels and the runtime's C ABI.
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>

#include "kernel.h"

namespace ortgraph {
namespace {

template <class Function>
Function at(const Slot* api, Position position) {
  return reinterpret_cast<Function>(api[position]);
}

Status* failure(const Slot* api, ErrorCode code, const std::string& what) {
  return at<Status* (*)(int, const char*)>(api, kCreateStatus)(code, what.c_str());
}

void release(const Slot* api, Status* status) { at<void (*)(Status*)>(api, kReleaseStatus)(status); }

void check(const Slot* api, Status* status, const char* what) {
  if (!status) return;
  release(api, status);
  throw std::runtime_error(std::string("ONNX Runtime refused: ") + what);
}

struct Instance {
  const Slot* api;
  std::string name;
  std::unique_ptr<Kernel> kernel;
};

const Definition* self(const CustomOp* op) { return static_cast<const Definition*>(op); }

template <class Body>
Status* guarded(const Slot* api, const std::string& name, const Body& body) {
  try {
    body();
    return nullptr;
  } catch (const std::invalid_argument& error) {
    return failure(api, kInvalidArgument, name + ": " + error.what());
  } catch (const std::exception& error) {
    return failure(api, kFail, name + ": " + error.what());
  }
}

Status* create(const CustomOp* op, const Slot* api, const KernelInfo* info, void** kernel) {
  return guarded(api, self(op)->op_name, [&] {
    *kernel = new Instance{api, self(op)->op_name, self(op)->factory(Attributes(api, info))};
  });
}

Status* run(void* kernel, KernelContext* raw) {
  const auto* instance = static_cast<const Instance*>(kernel);
  return guarded(instance->api, instance->name,
                 [&] { instance->kernel->compute(Context(instance->api, raw)); });
}

double shortest_decimal(float value) {
  char text[32];
  for (int digits = 1; digits <= 9; ++digits) {
    std::snprintf(text, sizeof text, "%.*g", digits, static_cast<double>(value));
    if (std::strtof(text, nullptr) == value) break;
  }
  return std::strtod(text, nullptr);
}

}  // namespace

Shape::Shape(std::initializer_list<std::int64_t> dims) {
  for (std::int64_t d : dims) dim[rank++] = d;
}

std::int64_t Shape::count(std::size_t begin, std::size_t end) const {
  std::int64_t product = 1;
  for (std::size_t i = begin; i < end; ++i) product *= dim[i];
  return product;
}

std::int64_t Shape::count() const { return count(0, rank); }

bool Shape::operator==(const Shape& other) const {
  return rank == other.rank && std::equal(dim.begin(), dim.begin() + rank, other.dim.begin());
}

double Attributes::decimal(const char* name, double fallback) const {
  float value = 0;
  Status* status = at<Status* (*)(const KernelInfo*, const char*, float*)>(api_, kAttributeFloat)(info_, name, &value);
  if (!status) return shortest_decimal(value);
  release(api_, status);
  return fallback;
}

std::int64_t Attributes::integer(const char* name, std::int64_t fallback) const {
  std::int64_t value = 0;
  Status* status =
      at<Status* (*)(const KernelInfo*, const char*, std::int64_t*)>(api_, kAttributeInt)(info_, name, &value);
  if (!status) return value;
  release(api_, status);
  return fallback;
}

std::string Attributes::text(const char* name, const char* fallback) const {
  char buffer[64];
  std::size_t size = sizeof buffer;
  Status* status = at<Status* (*)(const KernelInfo*, const char*, char*, std::size_t*)>(api_, kAttributeString)(
      info_, name, buffer, &size);
  if (!status) return std::string(buffer, strnlen(buffer, size));
  release(api_, status);
  return fallback;
}

Shape Attributes::shape(const char* name) const {
  Shape shape;
  std::size_t size = kMaxRank;
  Status* status = at<Status* (*)(const KernelInfo*, const char*, std::int64_t*, std::size_t*)>(api_, kAttributeInts)(
      info_, name, shape.dim.data(), &size);
  if (!status) {
    shape.rank = size;
    return shape;
  }
  release(api_, status);
  expect(size <= kMaxRank, "an attribute has more than 8 integers");
  return Shape{};
}

std::size_t Context::inputs() const {
  std::size_t count = 0;
  check(api_, at<Status* (*)(const KernelContext*, std::size_t*)>(api_, kInputCount)(raw_, &count), "input count");
  return count;
}

std::size_t Context::outputs() const {
  std::size_t count = 0;
  check(api_, at<Status* (*)(const KernelContext*, std::size_t*)>(api_, kOutputCount)(raw_, &count), "output count");
  return count;
}

Tensor Context::input(std::size_t index) const {
  Tensor tensor;
  if (index >= inputs()) return tensor;
  const Value* value = nullptr;
  check(api_, at<Status* (*)(const KernelContext*, std::size_t, const Value**)>(api_, kInput)(raw_, index, &value),
        "input");
  if (!value) return tensor;
  ShapeInfo* info = nullptr;
  check(api_, at<Status* (*)(const Value*, ShapeInfo**)>(api_, kTypeAndShape)(value, &info), "input shape");
  at<Status* (*)(const ShapeInfo*, std::size_t*)>(api_, kRank)(info, &tensor.shape.rank);
  const bool fits = tensor.shape.rank <= kMaxRank;
  if (fits) {
    at<Status* (*)(const ShapeInfo*, std::int64_t*, std::size_t)>(api_, kDimensions)(info, tensor.shape.dim.data(),
                                                                                     tensor.shape.rank);
  }
  int type = kFloat;
  check(api_, at<Status* (*)(const ShapeInfo*, int*)>(api_, kElementType)(info, &type), "element type");
  tensor.type = static_cast<ElementType>(type);
  at<void (*)(ShapeInfo*)>(api_, kReleaseShape)(info);
  expect(fits, "more than 8 dimensions");
  void* data = nullptr;
  check(api_, at<Status* (*)(const Value*, void**)>(api_, kTensorData)(value, &data), "input data");
  tensor.raw = data;
  tensor.present = true;
  return tensor;
}

void* Context::output(std::size_t index, const Shape& shape) const {
  Value* value = output_value(index, shape);
  if (!value) return nullptr;
  void* data = nullptr;
  check(api_, at<Status* (*)(const Value*, void**)>(api_, kTensorData)(value, &data), "output data");
  return data;
}

Output Context::typed_output(std::size_t index, const Shape& shape) const {
  Output output;
  Value* value = output_value(index, shape);
  if (!value) return output;
  check(api_, at<Status* (*)(const Value*, void**)>(api_, kTensorData)(value, &output.raw), "output data");
  ShapeInfo* info = nullptr;
  check(api_, at<Status* (*)(const Value*, ShapeInfo**)>(api_, kTypeAndShape)(value, &info), "output type");
  int type = kFloat;
  check(api_, at<Status* (*)(const ShapeInfo*, int*)>(api_, kElementType)(info, &type), "element type");
  at<void (*)(ShapeInfo*)>(api_, kReleaseShape)(info);
  output.type = static_cast<ElementType>(type);
  return output;
}

Value* Context::output_value(std::size_t index, const Shape& shape) const {
  if (index >= outputs()) return nullptr;
  Value* value = nullptr;
  check(api_,
        at<Status* (*)(KernelContext*, std::size_t, const std::int64_t*, std::size_t, Value**)>(api_, kOutput)(
            raw_, index, shape.dim.data(), shape.rank, &value),
        "an output: its shape differs from the bound buffer's");
  return value;
}

void Context::run_parallel(void (*body)(void*, std::size_t), std::size_t parts, void* data) const {
  check(api_,
        at<Status* (*)(const KernelContext*, void (*)(void*, std::size_t), std::size_t, std::size_t, void*)>(
            api_, kParallelFor)(raw_, body, parts, 0, data),
        "ParallelFor");
}

Definition::Definition(std::string name_, std::vector<Port> inputs, std::vector<Port> outputs, Factory factory_)
    : CustomOp{}, op_name(std::move(name_)), in(std::move(inputs)), out(std::move(outputs)), factory(factory_) {
  version = kApiVersion;
  name = [](const CustomOp* op) { return self(op)->op_name.c_str(); };
  provider = [](const CustomOp*) -> const char* { return nullptr; };
  input_type = [](const CustomOp* op, std::size_t i) -> int { return self(op)->in[i].type; };
  input_count = [](const CustomOp* op) { return self(op)->in.size(); };
  output_type = [](const CustomOp* op, std::size_t i) -> int { return self(op)->out[i].type; };
  output_count = [](const CustomOp* op) { return self(op)->out.size(); };
  destroy = [](void* kernel) { delete static_cast<Instance*>(kernel); };
  input_characteristic = [](const CustomOp* op, std::size_t i) -> int { return self(op)->in[i].kind; };
  output_characteristic = [](const CustomOp* op, std::size_t i) -> int { return self(op)->out[i].kind; };
  input_memory = [](const CustomOp*, std::size_t) { return 0; };
  variadic_input_minimum = [](const CustomOp*) { return 1; };
  variadic_input_homogeneous = [](const CustomOp*) { return 1; };
  variadic_output_minimum = [](const CustomOp*) { return 1; };
  variadic_output_homogeneous = [](const CustomOp*) { return 1; };
  create_kernel_v2 = create;
  compute_v2 = run;
  start_version = [](const CustomOp*) { return 1; };
  end_version = [](const CustomOp*) { return 1; };
}

void add_variants(Definitions& to, const char* name, const std::vector<Port>& inputs, const std::vector<Port>& outputs,
                  Definition::Factory factory, bool half) {
  static std::deque<Definition> made;  // sessions keep pointing to them
  std::vector<ElementType> types{kFloat, kBfloat16};
  if (half) types.push_back(kHalf);
  int groups = 0;
  for (const auto* ports : {&inputs, &outputs}) {
    for (const Port& port : *ports) groups = std::max(groups, port.group + 1);
  }
  std::size_t combinations = 1;
  for (int g = 0; g < groups; ++g) combinations *= types.size();
  for (std::size_t c = 0; c < combinations; ++c) {
    std::vector<ElementType> chosen;
    for (std::size_t rest = c; chosen.size() < static_cast<std::size_t>(groups); rest /= types.size()) {
      chosen.push_back(types[rest % types.size()]);
    }
    std::vector<Port> in = inputs, out = outputs;
    for (auto* ports : {&in, &out}) {
      for (Port& port : *ports) {
        if (port.group >= 0) port.type = chosen[static_cast<std::size_t>(port.group)];
      }
    }
    std::string letters;
    for (int g = 0; g < groups; ++g) {
      const ElementType type = chosen[static_cast<std::size_t>(g)];
      if (std::any_of(out.begin(), out.end(), [&](const Port& port) { return port.group == g; })) {
        letters += type == kFloat ? 'f' : type == kBfloat16 ? 'b' : 'h';
      }
    }
    const bool plain = letters.find_first_not_of('f') == std::string::npos;
    to.push_back(&made.emplace_back(plain ? std::string(name) : name + ("_" + letters), in, out, factory));
  }
}

Status* register_operators(SessionOptions* options, const ApiBase* base, const char* domain_name,
                           const Definitions& definitions) {
  const Slot* api = base->get_api(kApiVersion);
  if (!api) {
    // No table, so no way to make a status: without operators the session refuses the graph and names them.
    return nullptr;
  }
  static OpDomain* domain = nullptr;  // lives as long as the library: sessions keep pointing to it
  static std::mutex lock;
  const std::lock_guard<std::mutex> held(lock);
  if (!domain) {
    OpDomain* fresh = nullptr;
    if (auto* status = at<Status* (*)(const char*, OpDomain**)>(api, kCreateDomain)(domain_name, &fresh)) {
      return status;
    }
    for (const Definition* definition : definitions) {
      if (auto* status = at<Status* (*)(OpDomain*, const CustomOp*)>(api, kDomainAdd)(fresh, definition)) return status;
    }
    domain = fresh;
  }
  return at<Status* (*)(SessionOptions*, OpDomain*)>(api, kAddDomain)(options, domain);
}

}  // namespace ortgraph
