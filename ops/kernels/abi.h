// Declarations of the part of ONNX Runtime's public C ABI that the kernels use.
//
// The function table only ever grows, so a position is a fact that holds for every runtime from 1.17 on (the release
// that added ParallelFor). Types that the runtime owns stay opaque.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ortgraph {

struct Status;
struct SessionOptions;
struct OpDomain;
struct KernelInfo;
struct KernelContext;
struct Value;
struct ShapeInfo;

using Slot = void (*)();

constexpr std::uint32_t kApiVersion = 17;

struct ApiBase {
  const Slot* (*get_api)(std::uint32_t version);
  const char* (*version_string)();
};

enum Position : std::size_t {
  kCreateStatus = 0,
  kCreateDomain = 26,
  kDomainAdd = 27,
  kAddDomain = 28,
  kTensorData = 51,
  kElementType = 60,
  kRank = 61,
  kDimensions = 62,
  kTypeAndShape = 65,
  kAttributeFloat = 85,
  kAttributeInt = 86,
  kAttributeString = 87,
  kInputCount = 88,
  kOutputCount = 89,
  kInput = 90,
  kOutput = 91,
  kReleaseStatus = 93,
  kReleaseShape = 99,
  kAttributeInts = 163,
  kParallelFor = 274,
};

enum ElementType : int { kFloat = 1, kInt64 = 7, kBool = 9, kHalf = 10, kBfloat16 = 16 };
enum Characteristic : int { kRequired = 0, kOptional = 1, kVariadic = 2 };
enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };

// The structure that describes one custom operator. Members in the order and with the signatures that the runtime reads
// for version 17.
struct CustomOp {
  std::uint32_t version;
  void* (*create_kernel)(const CustomOp*, const Slot*, const KernelInfo*);
  const char* (*name)(const CustomOp*);
  const char* (*provider)(const CustomOp*);
  int (*input_type)(const CustomOp*, std::size_t);
  std::size_t (*input_count)(const CustomOp*);
  int (*output_type)(const CustomOp*, std::size_t);
  std::size_t (*output_count)(const CustomOp*);
  void (*compute)(void*, KernelContext*);
  void (*destroy)(void*);
  int (*input_characteristic)(const CustomOp*, std::size_t);
  int (*output_characteristic)(const CustomOp*, std::size_t);
  int (*input_memory)(const CustomOp*, std::size_t);
  int (*variadic_input_minimum)(const CustomOp*);
  int (*variadic_input_homogeneous)(const CustomOp*);
  int (*variadic_output_minimum)(const CustomOp*);
  int (*variadic_output_homogeneous)(const CustomOp*);
  Status* (*create_kernel_v2)(const CustomOp*, const Slot*, const KernelInfo*, void**);
  Status* (*compute_v2)(void*, KernelContext*);
  Status* (*infer_shape)(const CustomOp*, void*);
  int (*start_version)(const CustomOp*);
  int (*end_version)(const CustomOp*);
};

}  // namespace ortgraph
