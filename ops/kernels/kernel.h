// What a kernel sees: attributes when it is created, tensors and the runtime's thread pool when it runs.
#pragma once

#include <algorithm>
#include <array>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "abi.h"

namespace ortgraph {

constexpr std::size_t kMaxRank = 8;

struct Shape {
  std::array<std::int64_t, kMaxRank> dim{};
  std::size_t rank = 0;

  Shape() = default;
  Shape(std::initializer_list<std::int64_t> dims);
  std::int64_t count() const;
  std::int64_t count(std::size_t begin, std::size_t end) const;
  std::int64_t back() const { return rank ? dim[rank - 1] : 1; }
  std::int64_t rows() const { return rank ? count(0, rank - 1) : 1; }
  bool operator==(const Shape& other) const;
};

struct Tensor {
  const void* raw = nullptr;
  Shape shape;
  ElementType type = kFloat;

  explicit operator bool() const { return present; }
  const float* floats() const { return static_cast<const float*>(raw); }
  const std::int64_t* ints() const { return static_cast<const std::int64_t*>(raw); }
  bool present = false;
};

// An output that may be in low precision; raw is null when the node leaves it out.
struct Output {
  void* raw = nullptr;
  ElementType type = kFloat;

  explicit operator bool() const { return raw != nullptr; }
};

class Attributes {
 public:
  Attributes(const Slot* api, const KernelInfo* info) : api_(api), info_(info) {}
  // The double nearest to the shortest decimal that rounds to the stored float: 0.999 is 0.999, not 0.99900001287.
  double decimal(const char* name, double fallback) const;
  std::int64_t integer(const char* name, std::int64_t fallback) const;
  Shape shape(const char* name) const;  // a list of integers; empty when the attribute is missing
  std::string text(const char* name, const char* fallback) const;

 private:
  const Slot* api_;
  const KernelInfo* info_;
};

class Context {
 public:
  Context(const Slot* api, KernelContext* raw) : api_(api), raw_(raw) {}

  std::size_t inputs() const;
  std::size_t outputs() const;
  Tensor input(std::size_t index) const;
  // Null when the node leaves the output out.
  void* output(std::size_t index, const Shape& shape) const;
  Output typed_output(std::size_t index, const Shape& shape) const;
  float* floats(std::size_t index, const Shape& shape) const { return static_cast<float*>(output(index, shape)); }

  // body(part) for part in [0, parts), on the session's own threads. Which thread runs a part is not fixed, so a part
  // must not depend on another and the split must not depend on the number of threads.
  template <class Body>
  void parallel(std::size_t parts, const Body& body) const {
    if (parts == 0) return;
    if (parts == 1) return body(std::size_t{0});
    run_parallel([](void* data, std::size_t part) { (*static_cast<const Body*>(data))(part); }, parts,
                 const_cast<Body*>(&body));
  }

  // body(begin, end) over [0, total) elements in fixed pieces.
  template <class Body>
  void elements(std::int64_t total, const Body& body) const {
    split(total, (piece(total, kGrain) + 15) / 16 * 16, body);
  }

  // body(begin, end) over [0, rows) rows of `width` elements in fixed pieces.
  template <class Body>
  void rows(std::int64_t rows, std::int64_t width, const Body& body) const {
    split(rows, row_piece(rows, width), body);
  }
  static std::int64_t row_piece(std::int64_t rows, std::int64_t width) {
    return piece(rows, kGrain / std::max<std::int64_t>(width, 1));
  }
  static std::int64_t row_parts(std::int64_t rows, std::int64_t width) {
    const std::int64_t size = row_piece(rows, width);
    return (rows + size - 1) / size;
  }

  static constexpr std::int64_t kMaxParts = 32;
  static constexpr std::int64_t kGrain = 8192;  // elements: below this a hand-over costs more than it saves

 private:
  static std::int64_t piece(std::int64_t total, std::int64_t grain) {
    return std::max<std::int64_t>({(total + kMaxParts - 1) / kMaxParts, grain, 1});
  }
  template <class Body>
  void split(std::int64_t total, std::int64_t size, const Body& body) const {
    parallel(static_cast<std::size_t>((total + size - 1) / size), [&](std::size_t part) {
      const std::int64_t begin = static_cast<std::int64_t>(part) * size;
      body(begin, std::min(total, begin + size));
    });
  }
  void run_parallel(void (*body)(void*, std::size_t), std::size_t parts, void* data) const;
  Value* output_value(std::size_t index, const Shape& shape) const;

  const Slot* api_;
  KernelContext* raw_;
};

class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual void compute(const Context& context) const = 0;
};

// Scratch memory, 64-byte aligned; its size is stated in the kernel table.
template <class T>
class Scratch {
 public:
  explicit Scratch(std::size_t count)
      : data_(static_cast<T*>(std::aligned_alloc(64, (std::max<std::size_t>(count, 1) * sizeof(T) + 63) / 64 * 64))) {
    if (!data_) throw std::bad_alloc();
  }
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  Scratch& operator=(Scratch&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  T* data() const { return data_; }
  T& operator[](std::size_t i) const { return data_[i]; }

 private:
  T* data_;
};

struct Port {
  ElementType type = kFloat;
  Characteristic kind = kRequired;
  int group = -1;  // 0 and up: in low precision too, the same type as the other ports of the group
};

// A port that takes float32 and bf16 (and fp16, where the kernel has it).
constexpr Port low(int group, Characteristic kind = kRequired) { return {kFloat, kind, group}; }

struct Definition : CustomOp {
  using Factory = std::unique_ptr<Kernel> (*)(const Attributes&);
  Definition(std::string name, std::vector<Port> inputs, std::vector<Port> outputs, Factory factory);

  std::string op_name;
  std::vector<Port> in, out;
  Factory factory;
};

template <class K>
std::unique_ptr<Kernel> make(const Attributes& attributes) {
  return std::make_unique<K>(attributes);
}

inline std::int64_t same_count(const Tensor& a, const Tensor& b) {
  if (!a || !b || a.shape.count() != b.shape.count()) throw std::invalid_argument("inputs differ in shape");
  return a.shape.count();
}

constexpr Port kF{kFloat, kRequired}, kF_{kFloat, kOptional}, kI{kInt64, kRequired}, kB{kBool, kRequired},
    kFs{kFloat, kVariadic};

[[noreturn]] inline void refuse(const std::string& what) { throw std::invalid_argument(what); }
inline void expect(bool holds, const char* what) {
  if (!holds) refuse(what);
}

using Definitions = std::vector<Definition*>;

// Registers a library's operators under one domain; what its entry point returns.
Status* register_operators(SessionOptions* options, const ApiBase* base, const char* domain,
                           const Definitions& definitions);

// One definition for each combination of types of the groups. The runtime tells variants of one name apart by their
// inputs only, so a name ends in one letter (f, b, h) for each group with an output, unless all of these are float32.
void add_variants(Definitions& to, const char* name, const std::vector<Port>& inputs, const std::vector<Port>& outputs,
                  Definition::Factory factory, bool half = false);

// One per source file; library.cpp registers what they return.
void add_activation(Definitions& to);
void add_attention(Definitions& to);
void add_attention_grad(Definitions& to);
void add_batch_norm(Definitions& to);
void add_convolution(Definitions& to);
void add_convolution_grad(Definitions& to);
void add_embedding(Definitions& to);
void add_loss(Definitions& to);
void add_movement(Definitions& to);
void add_normalization(Definitions& to);
void add_optimizer(Definitions& to);
void add_pooling(Definitions& to);
void add_product(Definitions& to);
void add_random(Definitions& to);
void add_reduction(Definitions& to);
void add_softmax(Definitions& to);

}  // namespace ortgraph
