// Operations: each runs the CPU's own kernel, late, on CPU tensors that share the device's memory.
#include "device.h"

#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_ops.h>
#include <ATen/ops/_local_scalar_dense_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/div_ops.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <cstring>
#include <set>
#include <unordered_map>

namespace emulated {
namespace {

using at::Tensor;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

// Kernels run on whichever thread comes by. Whatever modes that thread is in are none of theirs.
struct Plain {
  c10::impl::ForceDispatchKeyGuard guard{
      c10::DispatchKeySet({c10::DispatchKey::BackendSelect}),
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset};
};

// A tensor as queued work knows it: by address, so that it keeps nothing alive.
struct Ref {
  at::DimVector sizes, strides;
  int64_t offset = 0;
  caffe2::TypeMeta dtype;
  char* base = nullptr;
  size_t bytes = 0;
  bool defined = false, number = false;
  Tensor host;  // Of a CPU tensor, a copy as it was at the launch.
};

bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

Tensor make_tensor(c10::DataPtr memory, const Ref& ref) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), ref.bytes, std::move(memory), nullptr, false);
  Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                           c10::DispatchKeySet(c10::DispatchKey::CPU), ref.dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(ref.sizes, ref.strides, ref.offset);
  if (ref.number) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

Tensor alias(const Ref& ref) {
  if (!ref.defined || ref.host.defined()) return ref.host;
  return make_tensor(c10::DataPtr(ref.base, c10::kCPU), ref);
}

// A tensor of the same shape for a trial run, of zeros: they are valid as indices, too.
Tensor stand_in(const Ref& ref) {
  if (!ref.defined || ref.host.defined()) return ref.host;
  Ref own = ref;
  own.bytes = at::detail::computeStorageNbytes(ref.sizes, ref.strides, ref.dtype.itemsize(), ref.offset);
  auto memory = c10::GetAllocator(c10::kCPU)->allocate(own.bytes);
  if (own.bytes) std::memset(memory.get(), 0, own.bytes);
  return make_tensor(std::move(memory), own);
}

Ref describe(const Tensor& tensor) {
  Ref ref;
  if (!tensor.defined()) return ref;
  TORCH_CHECK(tensor.layout() == c10::kStrided, "The emulated device has strided tensors only");
  auto* impl = tensor.unsafeGetTensorImpl();
  ref.defined = true;
  ref.sizes = tensor.sizes();
  ref.strides = tensor.strides();
  ref.offset = tensor.storage_offset();
  ref.dtype = tensor.dtype();
  ref.number = impl->is_wrapped_number();
  ref.bytes = tensor.storage().nbytes();
  if (on_device(tensor)) {
    ref.base = shadow(tensor.storage().data());
  }
  return ref;
}

Ref snapshot(const Tensor& tensor) {
  Ref ref = describe(tensor);
  Plain plain;
  ref.host = at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  at::_ops::copy_::call(ref.host, tensor, false);
  if (ref.number) ref.host.unsafeGetTensorImpl()->set_wrapped_number(true);
  return ref;
}

Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, caffe2::TypeMeta dtype, int device) {
  c10::DeviceGuard guard({TYPE, c10::DeviceIndex(device)});
  return at::detail::empty_strided_generic(sizes, strides, allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::typeMetaToScalarType(dtype));
}

// ---- What is known of an operation from its schema

struct Info {
  std::string name;
  std::vector<int> returned;  // For each result, the argument that it is or views; -1 for a fresh one.
  std::vector<char> same;     // Whether that argument is written, and thus is the result itself.
  std::vector<char> written;  // For each argument.
  std::vector<char> out;      // For each argument, whether it is one that the operation may resize.
  int generator = -1;
  bool random = false;
  bool at_once = false;    // Results depend on values, or are no tensors.
  bool makes_tensors = false;  // Of a shape that must be known at the launch.
  bool makes_view = false;
  bool host_indices = false;
};

Info* info_of(const OperatorHandle& op) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<const void*, std::unique_ptr<Info>>;
  std::lock_guard<std::mutex> lock(mutex);
  auto& info = (*known)[&op.schema()];
  if (info) return info.get();
  info = std::make_unique<Info>();
  auto& schema = op.schema();
  info->name = schema.name().rfind("aten::", 0) == 0 ? schema.name().substr(6) : schema.name();
  for (auto& argument : schema.arguments()) {
    bool written = argument.alias_info() && argument.alias_info()->isWrite();
    info->written.push_back(written);
    info->out.push_back(written && argument.kwarg_only());
    if (argument.type()->str() == "Generator" || argument.type()->str() == "Generator?") {
      info->generator = int(info->written.size()) - 1;
    }
  }
  for (auto& result : schema.returns()) {
    int from = -1;
    bool write = false;
    if (result.alias_info()) {
      for (size_t i = 0; i < schema.arguments().size(); i++) {
        auto* other = schema.arguments()[i].alias_info();
        if (other && other->beforeSets() == result.alias_info()->beforeSets()) from = int(i);
      }
      write = result.alias_info()->isWrite();
    }
    info->returned.push_back(from);
    info->same.push_back(write);
    std::string type = result.type()->str();
    if (type != "Tensor" && type != "Tensor[]") info->at_once = true;
    if (!write) info->makes_tensors = true;
    if (from >= 0 && !write) info->makes_view = true;
  }
  // The CPU's fused attention has the tag for its relatives' sake. It has no dropout.
  info->random = info->generator >= 0 || (op.hasTag(at::Tag::nondeterministic_seeded) &&
                                          info->name.find("attention_for_cpu") == std::string::npos);
  bool by_value = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  info->host_indices = info->name.rfind("index", 0) == 0 || info->name.rfind("_index", 0) == 0;
  if (info->random || (by_value && !info->host_indices)) info->at_once = true;
  // Kernels from elsewhere may be Python functions, which need the GIL and so must not run from a queue.
  if (schema.name().rfind("aten::", 0) != 0) info->at_once = true;
  return info.get();
}

// ---- Launches

// The arguments of a call with its tensors taken out.
struct Call {
  OperatorHandle op;
  Info* info;
  std::vector<IValue> arguments;
  struct Slot {
    enum { Value, One, List, OptionalList } kind = Value;
    std::vector<Ref> refs;
  };
  std::vector<Slot> slots;
  int device = -1;

  // The arguments for the CPU's kernel.
  Stack stack(Tensor (*make)(const Ref&)) const {
    Stack stack;
    stack.reserve(arguments.size());
    for (size_t i = 0; i < arguments.size(); i++) {
      auto& slot = slots[i];
      if (slot.kind == Slot::Value) {
        bool ours = arguments[i].isDevice() && arguments[i].toDevice().type() == TYPE;
        stack.push_back(ours ? IValue(c10::Device(c10::kCPU)) : arguments[i]);
      } else if (slot.kind == Slot::One) {
        stack.emplace_back(make(slot.refs[0]));
      } else if (slot.kind == Slot::List) {
        c10::List<Tensor> list;
        list.reserve(slot.refs.size());
        for (auto& ref : slot.refs) list.push_back(make(ref));
        stack.emplace_back(std::move(list));
      } else {
        c10::List<std::optional<Tensor>> list;
        for (auto& ref : slot.refs) list.push_back(ref.defined ? std::optional<Tensor>(make(ref)) : std::nullopt);
        stack.emplace_back(std::move(list));
      }
    }
    return stack;
  }
};

Ref argument_ref(Call& call, const Tensor& tensor, size_t index) {
  if (!tensor.defined() || on_device(tensor)) {
    if (tensor.defined() && call.device < 0) call.device = tensor.device().index();
    return describe(tensor);
  }
  TORCH_CHECK(tensor.is_cpu(), call.info->name, ": expected all tensors to be on the same device, but got one on ",
              tensor.device());
  TORCH_CHECK((tensor.dim() == 0 || call.info->host_indices) && !call.info->written[index], call.info->name,
              ": expected all tensors to be on the same device, but got one on the CPU");
  return snapshot(tensor);
}

std::shared_ptr<Call> take_call(const OperatorHandle& op, Info* info, const Stack& stack) {
  size_t count = op.schema().arguments().size(), first = stack.size() - count;
  auto call = std::make_shared<Call>(Call{op, info, {}, {}, -1});
  call->arguments.resize(count);
  call->slots.resize(count);
  for (size_t i = 0; i < count; i++) {
    const IValue& value = stack[first + i];
    auto& slot = call->slots[i];
    if (value.isTensor()) {
      slot.kind = Call::Slot::One;
      slot.refs.push_back(argument_ref(*call, value.toTensor(), i));
    } else if (value.isTensorList()) {
      slot.kind = Call::Slot::List;
      for (const Tensor& tensor : value.toTensorVector()) slot.refs.push_back(argument_ref(*call, tensor, i));
    } else if (value.isOptionalTensorList()) {
      slot.kind = Call::Slot::OptionalList;
      for (auto& tensor : value.toOptionalTensorVector()) {
        slot.refs.push_back(argument_ref(*call, tensor.value_or(Tensor()), i));
      }
    } else {
      call->arguments[i] = value;
      if (value.isDevice() && value.toDevice().type() == TYPE && call->device < 0) {
        call->device = value.toDevice().index();
      }
    }
  }
  if (call->device < 0) call->device = current_device();
  return call;
}

// The shapes of results are remembered by the shapes of the arguments.
struct Key {
  std::string text;
  bool sound = true;
  template <typename T>
  void add(const T& value) {
    text.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void add(const Ref& ref, bool offset) {
    add(ref.defined);
    if (!ref.defined) return;
    add(ref.dtype.isScalarType() ? int(c10::typeMetaToScalarType(ref.dtype)) : -1);
    add(ref.number);
    add(ref.sizes.size());
    for (int64_t size : ref.sizes) add(size);
    for (int64_t stride : ref.strides) add(stride);
    if (offset) add(ref.offset);
  }
  void add(const IValue& value) {
    if (value.isNone()) {
      add('n');
    } else if (value.isInt()) {
      add('i'), add(value.toInt());
    } else if (value.isBool()) {
      add('b'), add(value.toBool());
    } else if (value.isDouble()) {
      add('d'), add(value.toDouble());
    } else if (value.isIntList()) {
      add('I');
      auto list = value.toIntVector();
      add(list.size());
      for (int64_t item : list) add(item);
    } else if (value.isBoolList()) {
      add('B');
      auto list = value.toBoolList();
      add(list.size());
      for (bool item : list) add(item);
    } else if (value.isDevice()) {
      add('D'), add(value.toDevice().type());
    } else if (value.isString()) {
      add('s'), add(value.toStringRef().size()), text += value.toStringRef();
    } else {
      sound = false;
    }
  }
};

// What the results of a call are like, found by a trial run of the kernel itself: torch's functions for it differ from
// the CPU's kernels, in strides and sometimes in types. For each result, one tensor or a list.
struct Shapes {
  std::vector<std::vector<Ref>> results;
  std::vector<char> list;
};

std::shared_ptr<Shapes> shapes_of(const Call& call) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<std::string, std::shared_ptr<Shapes>>;
  Key key;
  key.add(static_cast<const void*>(call.info));
  for (size_t i = 0; i < call.slots.size() && key.sound; i++) {
    auto& slot = call.slots[i];
    key.add(int(slot.kind));
    if (slot.kind == Call::Slot::Value) {
      key.add(call.arguments[i]);
    } else {
      key.add(slot.refs.size());
      for (auto& ref : slot.refs) key.add(ref, call.info->makes_view);
    }
  }
  if (key.sound) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = known->find(key.text);
    if (found != known->end()) return found->second;
  }
  auto shapes = std::make_shared<Shapes>();
  try {
    Plain plain;
    Stack stack = call.stack(&stand_in);
    call.op.callBoxed(&stack);
    for (auto& value : stack) {
      shapes->list.push_back(value.isTensorList());
      shapes->results.emplace_back();
      if (value.isTensor()) {
        shapes->results.back().push_back(describe(value.toTensor()));
      } else {
        for (const Tensor& tensor : value.toTensorVector()) shapes->results.back().push_back(describe(tensor));
      }
    }
  } catch (const std::exception&) {
    return nullptr;  // To be raised by the call itself.
  }
  if (key.sound) {
    std::lock_guard<std::mutex> lock(mutex);
    (*known)[key.text] = shapes;
  }
  return shapes;
}

void resize_tensor(const Tensor& tensor, c10::IntArrayRef sizes, std::optional<c10::IntArrayRef> strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  int64_t offset = tensor.storage_offset(), width = tensor.itemsize();
  size_t bytes = strides ? at::detail::computeStorageNbytes(sizes, *strides, width, offset)
                         : at::detail::computeStorageNbytesContiguous(sizes, width, offset);
  if (bytes > tensor.storage().nbytes()) resize_storage(tensor.storage().unsafeGetStorageImpl(), bytes);
  if (strides) {
    impl->set_sizes_and_strides(sizes, *strides);
  } else {
    impl->set_sizes_contiguous(sizes);
  }
}

Tensor view_of(const Tensor& base, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset,
               std::optional<caffe2::TypeMeta> dtype = std::nullopt) {
  Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                         base.key_set(), dtype.value_or(base.dtype()));
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return view;
}

const Tensor& tensor_at(const Stack& stack, size_t count, int index) {
  return stack[stack.size() - count + index].toTensor();
}

void copy_result(const Tensor& result, const Ref& to) {
  if (!to.defined) return;
  Tensor target = alias(to);
  if (result.defined() && result.data_ptr() != target.data_ptr()) at::_ops::copy_::call(target, result, false);
}

// Random numbers come from the device's generator, and are drawn at the launch.
void call_randomly(const Call& call, Stack& stack) {
  auto& hooks = at::detail::getPrivateUse1Hooks();
  if (call.info->generator >= 0) {
    IValue& generator = stack[call.info->generator];
    at::Generator ours = generator.isNone() ? hooks.getDefaultGenerator(call.device) : generator.toGenerator();
    if (ours.device().type() == TYPE) generator = cpu_generator(ours);
    call.op.callBoxed(&stack);
    return;
  }
  // This kernel draws from the CPU's generator, and takes no other.
  at::Generator ours = cpu_generator(hooks.getDefaultGenerator(call.device));
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> lock(ours.mutex());
  auto before = cpu.get_state();
  cpu.set_state(ours.get_state());
  call.op.callBoxed(&stack);
  ours.set_state(cpu.get_state());
  cpu.set_state(before);
}

void run_at_once(const std::shared_ptr<Call>& call, Stack* stack) {
  size_t count = call->slots.size();
  Info& info = *call->info;
  finish(current_stream(call->device));
  NoGil no_gil;
  Stack results = call->stack(&alias);
  std::vector<std::pair<int, Tensor>> resized;
  for (size_t i = 0; i < count; i++) {
    if (!info.out[i] || call->slots[i].kind != Call::Slot::One || tensor_at(*stack, count, int(i)).numel()) continue;
    Tensor fresh = at::detail::empty_cpu({0}, c10::typeMetaToScalarType(call->slots[i].refs[0].dtype));
    results[i] = fresh;
    resized.emplace_back(int(i), fresh);
  }
  {
    Plain plain;
    if (info.random) {
      call_randomly(*call, results);
    } else {
      call->op.callBoxed(&results);
    }
  }
  auto upload = [&](const Tensor& result, const Tensor& target) {
    Ref to = describe(target);
    Item item;
    item.name = info.name;
    item.run = [result, to] {
      Plain plain;
      copy_result(result, to);
    };
    enqueue(current_stream(call->device), std::move(item));
  };
  for (auto& [index, fresh] : resized) {
    const Tensor& out = tensor_at(*stack, count, index);
    resize_tensor(out, fresh.sizes(), std::nullopt);
    upload(fresh, out);
  }
  auto bring = [&](const Tensor& result, int from) -> Tensor {
    if (!result.defined()) return {};
    if (from >= 0) {
      const Tensor& base = tensor_at(*stack, count, from);
      return view_of(base, result.sizes(), result.strides(), result.storage_offset(), result.dtype());
    }
    Tensor made = empty_strided(result.sizes(), result.strides(), result.dtype(), call->device);
    if (result.numel()) upload(result, made);
    return made;
  };
  Stack returned;
  for (size_t i = 0; i < results.size(); i++) {
    int from = info.returned[i];
    if (info.same[i] && from >= 0) {
      returned.push_back((*stack)[stack->size() - count + from]);
    } else if (results[i].isTensor()) {
      returned.emplace_back(bring(results[i].toTensor(), from));
    } else if (results[i].isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : results[i].toTensorVector()) list.push_back(bring(tensor, from));
      returned.emplace_back(std::move(list));
    } else {
      returned.push_back(results[i]);
    }
  }
  torch::jit::drop(*stack, count);
  for (auto& value : returned) stack->push_back(std::move(value));
}

std::set<std::string>& mismatches() {
  static auto* names = new std::set<std::string>;
  return *names;
}

void fallback(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Info& info = *info_of(op);
  auto call = take_call(op, &info, *stack);
  size_t count = call->slots.size();
  if (info.at_once) return run_at_once(call, stack);
  // An out argument that is empty takes the size of the result, which the launch must know.
  for (size_t i = 0; i < count; i++) {
    if (!info.out[i] || call->slots[i].kind != Call::Slot::One || tensor_at(*stack, count, int(i)).numel()) continue;
    return run_at_once(call, stack);
  }
  std::shared_ptr<Shapes> shapes;
  if (info.makes_tensors) {
    shapes = shapes_of(*call);
    if (!shapes) return run_at_once(call, stack);
  }
  std::vector<std::vector<Ref>> targets(info.returned.size());
  Stack returned;
  bool views_only = info.makes_view;
  for (size_t i = 0; i < info.returned.size(); i++) {
    int from = info.returned[i];
    if (info.same[i] && from >= 0) {
      returned.push_back((*stack)[stack->size() - count + from]);
      views_only = false;
      continue;
    }
    std::vector<Tensor> made;
    for (auto& shape : shapes->results[i]) {
      if (!shape.defined) {
        made.emplace_back();
      } else if (from >= 0) {
        made.push_back(
            view_of(tensor_at(*stack, count, from), shape.sizes, shape.strides, shape.offset, shape.dtype));
      } else {
        views_only = false;
        made.push_back(empty_strided(shape.sizes, shape.strides, shape.dtype, call->device));
      }
      targets[i].push_back(from >= 0 ? Ref() : describe(made.back()));
    }
    if (shapes->list[i]) {
      returned.emplace_back(c10::List<Tensor>(c10::ArrayRef<Tensor>(made)));
    } else {
      returned.emplace_back(std::move(made[0]));
    }
  }
  torch::jit::drop(*stack, count);
  for (auto& value : returned) stack->push_back(std::move(value));
  if (views_only) return;
  Item item;
  item.name = info.name;
  item.run = [call, targets = std::move(targets)] {
    Plain plain;
    Stack results = call->stack(&alias);
    call->op.callBoxed(&results);
    for (size_t i = 0; i < targets.size(); i++) {
      for (size_t j = 0; j < targets[i].size(); j++) {
        auto& target = targets[i][j];
        if (!target.defined) continue;
        Tensor result = results[i].isTensor() ? results[i].toTensor() : results[i].toTensorVector()[j];
        if (result.sizes() != target.sizes || result.strides() != target.strides || result.dtype() != target.dtype) {
          static std::mutex mutex;
          std::lock_guard<std::mutex> lock(mutex);
          mismatches().insert(call->info->name);
        }
        copy_result(result, target);
      }
    }
  };
  enqueue(current_stream(call->device), std::move(item));
}

// ---- What torch needs of its own

Tensor empty_memory_format(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                           std::optional<c10::Device> device, std::optional<bool> pinned,
                           std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(sizes, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided_op(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> dtype,
                        std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  int index = device && device->has_index() ? device->index() : current_device();
  return empty_strided(sizes, strides, c10::scalarTypeToTypeMeta(c10::dtype_or_default(dtype)), index);
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<int64_t> offset) {
  int64_t at = offset.value_or(self.storage_offset());
  size_t need = at::detail::computeStorageNbytes(sizes, strides, self.itemsize(), at);
  TORCH_CHECK(need <= self.storage().nbytes() || self.storage().nbytes() == 0 || c10::multiply_integers(sizes) == 0,
              "as_strided: the view needs ", need, " bytes of a storage of ", self.storage().nbytes());
  return view_of(self, sizes, strides, at);
}

Tensor view(const Tensor& self, c10::IntArrayRef sizes) {
  at::DimVector inferred = at::infer_size_dv(sizes, self.numel());
  auto strides = at::detail::computeStride(self.sizes(), self.strides(), inferred);
  TORCH_CHECK(strides.has_value(),
              "view size is not compatible with input tensor's size and stride (at least one dimension spans across "
              "two contiguous subspaces). Use .reshape(...) instead.");
  return view_of(self, inferred, *strides, self.storage_offset());
}

Tensor reshape_alias(const Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return view_of(self, sizes, strides, self.storage_offset());
}

const Tensor& resize(const Tensor& self, c10::IntArrayRef sizes, std::optional<c10::MemoryFormat>) {
  if (self.sizes() != sizes) resize_tensor(self, sizes, std::nullopt);
  return self;
}

Tensor& set_storage_strided(Tensor& self, c10::Storage storage, int64_t offset, c10::IntArrayRef sizes,
                            c10::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (strides.empty() && !sizes.empty()) {
    resize_tensor(self, sizes, std::nullopt);
  } else {
    resize_tensor(self, sizes, strides);
  }
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage storage) {
  int64_t size = int64_t(storage.nbytes() / self.itemsize());
  return set_storage_strided(self, std::move(storage), 0, {size}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_strided(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, allocator()->allocate(0), allocator(), true);
  return set_storage_strided(self, std::move(storage), 0, {0}, {});
}

void copy_now(const Tensor& to, const Tensor& from) {
  Ref target = describe(to), source = describe(from);
  Tensor writable = on_device(to) ? alias(target) : to;
  Plain plain;
  at::_ops::copy_::call(writable, on_device(from) ? alias(source) : from, false);
}

void copy(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (!to.numel()) return;
  bool up = !on_device(from), down = !on_device(to);
  if (!up && !down) {
    Item item;
    item.name = "copy_";
    item.bytes = to.nbytes();
    item.run = [target = describe(to), source = describe(from)] {
      Plain plain;
      Tensor writable = alias(target);
      at::_ops::copy_::call(writable, alias(source), false);
    };
    int source = from.device().index(), target = to.device().index();
    if (source == target) {
      enqueue(current_stream(source), std::move(item));
    } else {
      // Each device's current stream is in order with a copy between the two.
      wait_for(current_stream(source), record(current_stream(target)));
      enqueue(current_stream(source), std::move(item));
      wait_for(current_stream(target), record(current_stream(source)));
    }
    return;
  }
  const Tensor& host = up ? from : to;
  const Tensor& device = up ? to : from;
  TORCH_CHECK(host.is_cpu(), "No copy between ", from.device(), " and ", to.device());
  Stream& stream = current_stream(device.device().index());
  // As with CUDA, a copy that has to convert or to rearrange goes by way of temporary memory, and is waited for.
  bool plain = from.dtype() == to.dtype() && from.sizes() == to.sizes() && from.strides() == to.strides() &&
               from.is_non_overlapping_and_dense();
  const char* pointer = static_cast<const char*>(host.data_ptr());
  Item item;
  item.kind = up ? Kind::Up : Kind::Down;
  item.name = up ? "copy up" : "copy down";
  item.bytes = to.nbytes();
  if (plain) {
    char* there = shadow(device.storage().data()) + device.storage_offset() * device.itemsize();
    char* here = const_cast<char*>(pointer);
    size_t bytes = to.nbytes();
    item.run = up ? std::function<void()>([=] { std::memcpy(there, here, bytes); })
                  : std::function<void()>([=] { std::memcpy(here, there, bytes); });
    bool late = non_blocking && is_pinned(pointer);
    if (late) {
      item.host = pointer;
      if (down) poison_target(here, bytes);
    }
    enqueue(stream, std::move(item));
    if (!late) finish(stream);
  } else {
    // The tensors outlive the closure, as this waits for it.
    item.run = [&from, &to] { copy_now(to, from); };
    enqueue(stream, std::move(item));
    finish(stream);
  }
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source)) return self;
  copy(source.sizes() == self.sizes() ? source : source.expand(self.sizes()), self, non_blocking);
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  copy(self.sizes() == to.sizes() ? self : self.expand(to.sizes()), to, non_blocking);
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  copy(self, to, false);
  return to;
}

c10::Scalar local_scalar_dense(const Tensor& self) {
  Stream& stream = current_stream(self.device().index());
  Ref ref = describe(self);
  Item item;  // For the trace.
  item.kind = Kind::Down;
  item.name = "number";
  enqueue(stream, std::move(item));
  finish(stream);
  Plain plain;
  return at::_ops::_local_scalar_dense::call(alias(ref));
}

void record_stream(Tensor& self, c10::Stream stream) { allocator()->recordStream(self.storage().data_ptr(), stream); }

// Torch lists the devices whose tensors `parameter.data = tensor` may exchange for the CPU's. This one is as CUDA.
bool can_take_place_of(const Tensor& self, const Tensor& other) {
  return self.layout() == c10::kStrided && other.layout() == c10::kStrided;
}

// Which kind of attention: as the CPU chooses for tensors of these shapes.
int64_t attention_choice(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                         double dropout, bool causal, std::optional<double> scale, bool grouped) {
  auto like = [](const Tensor& tensor) {
    Tensor made = alias(describe(tensor));
    return made.set_requires_grad(tensor.requires_grad());
  };
  std::optional<Tensor> mask_like;
  if (mask && mask->defined()) mask_like = like(*mask);
  return at::_ops::_fused_sdp_choice::call(like(query), like(key), like(value), mask_like, dropout, causal, scale,
                                           grouped);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty_memory_format);
  library.impl("empty_strided", &empty_strided_op);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage_storage_offset", &set_storage_strided);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_nothing);
  library.impl("copy_", &copy_);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("record_stream", &record_stream);
  library.impl("_has_compatible_shallow_copy_type", &can_take_place_of);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("_has_compatible_shallow_copy_type", &can_take_place_of);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace
}  // namespace emulated

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &emulated::attention_choice)
}  // namespace at::native

namespace emulated {

std::vector<std::string> shape_mismatches() { return {mismatches().begin(), mismatches().end()}; }

at::Tensor host_alias(const at::Tensor& tensor) { return alias(describe(tensor)); }

void divide(const at::Tensor& host, int64_t by) {
  Plain plain;
  Tensor target = host;
  at::_ops::div__Scalar::call(target, by);
}

void register_kernels() {
  using c10::DispatchKey;
  // Torch prefers a kernel composed of other operations to the fallback; the CPU prefers its own, if it has one.
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(DispatchKey::PrivateUse1)) continue;
    if (!op->hasKernelForDispatchKey(DispatchKey::CPU)) continue;
    if (!op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) &&
        !op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd)) {
      continue;
    }
    auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace emulated
