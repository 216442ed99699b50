// A torch backend for tests: a device in host memory that is as late as CUDA allows.
//
// Operations run at once, on the CPU, after everything that the current stream still has to do. Copies with
// non_blocking=True, copies on other streams and waits for events are only queued: they run when an operation of their
// stream needs them done, when the host waits, or (`late_set_lateness`) a random number of operations later. The
// bytes of a copy to the host are read then and delivered only when the host waits; until then the host sees a pattern.
// Freed blocks are overwritten with a pattern, in the order of the stream they belong to, and later than the work of
// streams that `record_stream` named. `late_device.py` builds this file and gives it its Python side.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/Generator.h>
#include <torch/library.h>

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <thread>
#include <unordered_map>

namespace at::autocast {  // by hand: their header brings half of all of torch's, and twice the time to compile
TORCH_API Tensor cached_cast(ScalarType, const Tensor&, DeviceType);
TORCH_API ScalarType get_autocast_dtype(DeviceType);
}  // namespace at::autocast

namespace {
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

// A holder may want Python's lock, to count a reference of a tensor: who holds that one lets it go while it waits here.
class Lock {
 public:
  explicit Lock(std::recursive_mutex& mutex) : mutex_(mutex) { lock(); }
  ~Lock() { if (held_) unlock(); }
  Lock(const Lock&) = delete;
  void lock() {
    if (!mutex_.try_lock()) {
      PyThreadState* state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
      mutex_.lock();
      if (state != nullptr) PyEval_RestoreThread(state);
    }
    held_ = true;
  }
  void unlock() {
    held_ = false;
    mutex_.unlock();
  }

 private:
  std::recursive_mutex& mutex_;
  bool held_ = false;
};

constexpr int kDevices = 2, kPieces = 4;
constexpr unsigned char kUnseen = 0xD5, kFreed = 0xC3;
constexpr auto kType = DeviceType::PrivateUse1;

// ---- streams

struct Task {
  std::function<void()> run;  // empty: wait for `ticket` of stream `on`
  c10::StreamId on = -1;
  uint64_t ticket = 0, due = UINT64_MAX;
};
struct Arrival {  // bytes that the host sees once it waits; or, with `on`, what another stream has to deliver before
  uint64_t ticket;
  char* to;
  std::vector<char> bytes;
  c10::StreamId on = -1;
  uint64_t of = 0;
};
struct Queue {
  std::deque<Task> tasks;
  std::deque<Arrival> arrivals;
  uint64_t queued = 0, done = 0;
};
struct Block {
  size_t size;
  DeviceIndex device;
  c10::StreamId stream;
  std::vector<c10::StreamId> users;
};

std::recursive_mutex mutex;
std::condition_variable_any progressed;
std::map<c10::StreamId, Queue> queues;  // ids of the devices' own streams are 0 and 1
std::map<char*, Block> blocks;
std::deque<std::pair<char*, size_t>> graveyard;
std::map<c10::StreamId, DeviceIndex> device_of;
std::unordered_map<char*, size_t> pinned;
std::mt19937_64 random_engine;
uint64_t num_operations = 0, lateness = 0, patience = 5, num_synchronised = 0, limit = UINT64_MAX, allocated = 0, peak = 0;
c10::StreamId next_stream = kDevices;
std::thread::id operator_thread;
thread_local DeviceIndex current = 0;
thread_local c10::StreamId current_stream[kDevices] = {0, 1};
thread_local bool inside = false;  // an operation is running: its own copies are part of it
thread_local uint64_t num_waits = 0;

uint64_t enqueue(c10::StreamId id, Task task) {
  auto& queue = queues[id];
  if (lateness) task.due = num_operations + random_engine() % lateness;
  queue.tasks.push_back(std::move(task));
  return ++queue.queued;
}

void drain(c10::StreamId id, uint64_t ticket);

void run_first(c10::StreamId id) {
  auto& queue = queues[id];
  Task task = std::move(queue.tasks.front());
  queue.tasks.pop_front();
  ++queue.done;
  if (task.run) {
    task.run();
  } else {
    drain(task.on, task.ticket);
    queue.arrivals.push_back({queue.done, nullptr, {}, task.on, task.ticket});
  }
}

void drain(c10::StreamId id, uint64_t ticket) {
  while (queues[id].done < std::min(ticket, queues[id].queued)) run_first(id);
}

void deliver(c10::StreamId id, uint64_t ticket) {
  auto& arrivals = queues[id].arrivals;
  while (!arrivals.empty() && arrivals.front().ticket <= ticket) {
    Arrival first = std::move(arrivals.front());
    arrivals.pop_front();
    if (first.to) std::memcpy(first.to, first.bytes.data(), first.bytes.size());
    else deliver(first.on, first.of);
  }
}

// The host waits. A thread beside the one that trains waits for that one first, as for a device that is busy: until
// training needs the work done, or has launched nothing for `patience` milliseconds.
void wait_for(c10::StreamId id, uint64_t ticket, bool counted = true) {
  Lock lock(mutex);
  if (counted) ++num_waits, ++num_synchronised;
  if (std::this_thread::get_id() != operator_thread) {
    uint64_t seen = num_operations;
    uint64_t idle = 0;
    while (queues[id].done < ticket && idle < patience) {
      progressed.wait_for(lock, std::chrono::milliseconds(1));
      idle = seen == num_operations ? idle + 1 : 0;
      seen = num_operations;
    }
  }
  drain(id, ticket);
  deliver(id, ticket);
}

// An operation of the current stream begins: it comes after all that this stream has to do.
void begin_operation(DeviceIndex device) {
  Lock lock(mutex);
  ++num_operations;
  operator_thread = std::this_thread::get_id();
  if (lateness)
    for (auto& [id, queue] : queues)
      while (!queue.tasks.empty() && queue.tasks.front().due <= num_operations &&
             (queue.tasks.front().run || queues[queue.tasks.front().on].done >= queue.tasks.front().ticket))
        run_first(id);
  drain(current_stream[device], UINT64_MAX);
  progressed.notify_all();
}

// ---- memory

void bury(char* memory, size_t size) {
  std::memset(memory, kFreed, size);
  graveyard.emplace_back(memory, size);
  size_t kept = 0;
  for (auto& grave : graveyard) kept += grave.second;
  for (; kept > (64u << 20) && graveyard.size() > 1; graveyard.pop_front()) {
    kept -= graveyard.front().second;
    std::free(graveyard.front().first);
  }
}

void release(void* pointer) {
  Lock lock(mutex);
  auto found = blocks.find(static_cast<char*>(pointer));
  if (found == blocks.end()) return;
  Block block = std::move(found->second);
  blocks.erase(found);
  allocated -= block.size;
  c10::StreamId last = block.stream;
  for (auto user : block.users) {  // after all that these streams were given so far
    enqueue(user, {{}, last, queues[last].queued});
    last = user;
  }
  Task task;
  task.run = [memory = static_cast<char*>(pointer), size = block.size] { bury(memory, size); };
  enqueue(last, std::move(task));
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    Lock lock(mutex);
    Device device(kType, current);
    if (!size) return {nullptr, nullptr, &release, device};
    TORCH_CHECK_WITH(OutOfMemoryError, allocated + size <= limit, "late device out of memory: ", size, " bytes asked");
    auto* memory = static_cast<char*>(std::aligned_alloc(64, (size + 63) / 64 * 64));
    std::memset(memory, kFreed, size);
    blocks[memory] = {size, current, current_stream[current], {}};
    allocated += size;
    peak = std::max(peak, allocated);
    return {memory, memory, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
} device_allocator;

void release_pinned(void* pointer) {
  Lock lock(mutex);
  pinned.erase(static_cast<char*>(pointer));
  // Copies that are queued may still use it: the memory is never given back (a test uses little of it).
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto* memory = static_cast<char*>(std::aligned_alloc(64, (size + 64) / 64 * 64));
    std::memset(memory, kFreed, size);
    Lock lock(mutex);
    pinned[memory] = size;
    return {memory, memory, &release_pinned, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
} pinned_allocator;

// ---- random numbers

struct Generator final : c10::GeneratorImpl {
  at::Generator inner = at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val);
  explicit Generator(DeviceIndex index)
      : GeneratorImpl(Device(kType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed + 7 + device_.index()); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(inner).seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->inner = inner.clone();
    return copy;
  }
};

at::Generator& default_generator(DeviceIndex index) {
  static at::Generator all[kDevices] = {at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return all[index < 0 ? current : index];
}

// ---- operations

at::Tensor on_host(const at::Tensor& tensor) {  // the same memory as a tensor of the CPU
  if (tensor.is_cpu()) return tensor;
  auto plain = at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU).requires_grad(false));
  if (tensor.is_conj()) plain = plain.conj();
  if (tensor.is_neg()) plain._set_neg(true);
  return plain;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto num = op.schema().arguments().size();
  DeviceIndex device = current;
  std::vector<at::Tensor> given;
  for (auto at = stack->size() - num; at < stack->size(); ++at) {
    auto& value = (*stack)[at];
    if (value.isTensor()) given.push_back(value.toTensor());
    else if (value.isTensorList()) for (const auto& item : value.toTensorVector()) given.push_back(item);
  }
  for (const auto& tensor : given)
    if (tensor.defined() && tensor.device().type() == kType) { device = tensor.device().index(); break; }
  at::Generator generator = default_generator(device);
  for (auto at = stack->size() - num; at < stack->size(); ++at) {
    auto& value = (*stack)[at];
    if (value.isGenerator()) {
      if (value.toGenerator().device().type() == kType) generator = value.toGenerator();
      value = c10::IValue();
    }
  }
  begin_operation(device);
  const bool outer = !inside;
  const DeviceIndex before = current;
  inside = true;
  current = device;
  auto finish = c10::make_scope_exit([&] { inside = !outer; current = before; });
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return at::native::cpu_fallback(op, stack);
  auto host = at::detail::getDefaultCPUGenerator();
  auto host_state = host.get_state();
  host.set_state(generator.get_state());
  auto put_back = c10::make_scope_exit([&] { generator.set_state(host.get_state()); host.set_state(host_state); });
  at::native::cpu_fallback(op, stack);
}

// Under autocast: what torch's own kernels for its devices do, for any operation.
template <bool kLower>
void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const auto dtype = kLower ? at::autocast::get_autocast_dtype(kType) : at::kFloat;
  for (auto at = stack->size() - op.schema().arguments().size(); at < stack->size(); ++at)
    if ((*stack)[at].isTensor()) (*stack)[at] = at::autocast::cached_cast(dtype, (*stack)[at].toTensor(), kType);
  op.callBoxed(stack);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (inside) {
    on_host(to).copy_(on_host(from));
    return to;
  }
  const auto device = (to.is_cpu() ? from : to).device().index();
  const auto id = current_stream[device];
  const bool same = from.scalar_type() == to.scalar_type() && from.is_contiguous() && to.is_contiguous() &&
      from.sizes() == to.sizes() && !from.is_conj() && !from.is_neg() && !to.is_conj() && !to.is_neg();
  if (!to.is_cpu() && !from.is_cpu()) {
    const auto other = current_stream[from.device().index()];
    if (id < kDevices) {  // the main stream: an operation like others, after both devices' streams
      begin_operation(from.device().index());
      begin_operation(device);
      on_host(to).copy_(on_host(from));
    } else {
      Lock lock(mutex);
      if (other != id) enqueue(id, {{}, other, queues[other].queued});
      Task task;
      task.run = [from, to] { on_host(to).copy_(on_host(from)); };
      enqueue(id, std::move(task));
    }
    return to;
  }
  bool late = non_blocking && same;
  if (late && from.is_cpu()) {
    Lock lock(mutex);
    late = from.is_pinned();  // else the driver takes the bytes before it returns
  }
  Lock lock(mutex);
  operator_thread = std::this_thread::get_id();
  if (!late || from.is_cpu()) {
    Task task;
    task.run = [source = on_host(from), target = on_host(to)] { target.copy_(source); };
    const auto ticket = enqueue(id, std::move(task));
    if (!late) {
      lock.unlock();
      if (!non_blocking || to.is_cpu()) wait_for(id, ticket);
      else { Lock again(mutex); drain(id, ticket); }
    }
    return to;
  }
  // To the host: no reference to the tensor is kept, exactly as CUDA keeps none.
  auto* source = static_cast<char*>(from.data_ptr());
  auto* target = static_cast<char*>(to.data_ptr());
  const size_t size = from.nbytes(), piece = std::max<size_t>(64, size / kPieces + 1);
  std::memset(target, kUnseen, size);
  for (size_t start = 0; start < size; start += piece) {
    const size_t length = std::min(piece, size - start);
    Task task;
    task.run = [=] {
      auto& queue = queues[id];
      queue.arrivals.push_back({queue.done, target + start, {source + start, source + start + length}});
    };
    enqueue(id, std::move(task));
  }
  return to;
}

at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar read_scalar(const at::Tensor& tensor) {
  const auto id = current_stream[tensor.device().index()];
  if (!inside) operator_thread = std::this_thread::get_id();
  if (!inside) wait_for(id, queues[id].queued);
  return on_host(tensor).item();
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  const auto index = device && device->has_index() ? device->index() : current;
  const c10::DeviceGuard guard(Device(kType, index));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const auto index = device && device->has_index() ? device->index() : current;
  const c10::DeviceGuard guard(Device(kType, index));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor as_strided(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  auto start = offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
  return at::native::as_strided_tensorimpl(
      tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}
at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return as_strided(tensor, size, stride, std::nullopt);
}
const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = tensor.unsafeGetTensorImpl();
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  impl->set_sizes_contiguous(sizes);
  const size_t bytes = (impl->storage_offset() + impl->numel()) * tensor.itemsize();
  if (bytes > tensor.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), bytes);
  return tensor;
}
at::Tensor& set_storage(at::Tensor& tensor, c10::Storage source) {
  const int64_t num = source.nbytes() / tensor.itemsize();
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  tensor.unsafeGetTensorImpl()->set_storage_offset(0);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({num});
  return tensor;
}
at::Tensor& set_part(at::Tensor& tensor, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                     c10::SymIntArrayRef stride) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  tensor.unsafeGetTensorImpl()->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.size() == size.size()) tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride));
  else tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}
at::Tensor& set_like(at::Tensor& tensor, const at::Tensor& source) {
  return set_part(tensor, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}
void record_stream(at::Tensor& tensor, Stream stream) {
  Lock lock(mutex);
  auto found = blocks.upper_bound(static_cast<char*>(tensor.storage().mutable_data()));
  if (found == blocks.begin()) return;
  --found;
  if (stream.id() != found->second.stream) found->second.users.push_back(stream.id());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  m.impl("mm", torch::CppFunction::makeFromBoxedFunction<&autocast<true>>());
  m.impl("linear", torch::CppFunction::makeFromBoxedFunction<&autocast<true>>());
  m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&autocast<false>>());
}
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_part);
  m.impl("set_.source_Tensor", &set_like);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_and_resize);
  m.impl("_local_scalar_dense", &read_scalar);
  m.impl("record_stream", &record_stream);
}

// ---- what torch asks a backend

struct Recorded {
  c10::StreamId stream;
  uint64_t ticket;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kType; }
  Device exchangeDevice(Device device) const override {
    const auto before = current;
    if (device.index() >= 0) current = device.index();
    return {kType, before};
  }
  Device getDevice() const override { return {kType, current}; }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override { if (device.index() >= 0) current = device.index(); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  static Device fixed(Device device) { return {kType, device.index() < 0 ? current : device.index()}; }
  Stream getStream(Device device) const override {
    return Stream(Stream::UNSAFE, fixed(device), current_stream[fixed(device).index()]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::UNSAFE, fixed(device), fixed(device).index());
  }
  Stream getNewStream(Device device, int) const override {
    Lock lock(mutex);
    return Stream(Stream::UNSAFE, fixed(device), next_stream++);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    const auto before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    Lock lock(mutex);
    if (!*event) *event = new Recorded;
    *static_cast<Recorded*>(*event) = {stream.id(), queues[stream.id()].queued};
  }
  void block(void* event, const Stream& stream) const override {
    Lock lock(mutex);
    if (!event) return;
    auto& recorded = *static_cast<Recorded*>(event);
    if (recorded.stream != stream.id()) enqueue(stream.id(), {{}, recorded.stream, recorded.ticket});
  }
  bool queryEvent(void* event) const override {
    Lock lock(mutex);
    if (!event) return true;
    auto& recorded = *static_cast<Recorded*>(event);
    return queues[recorded.stream].done >= recorded.ticket;
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Recorded*>(event); }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    Recorded recorded;
    {
      Lock lock(mutex);
      recorded = *static_cast<Recorded*>(event);
    }
    wait_for(recorded.stream, recorded.ticket);
  }
  bool queryStream(const Stream& stream) const override {
    Lock lock(mutex);
    return queues[stream.id()].tasks.empty();
  }
  void synchronizeStream(const Stream& stream) const override { wait_for(stream.id(), queues[stream.id()].queued); }
  void synchronizeDevice(DeviceIndex) const override {
    std::vector<c10::StreamId> all;
    {
      Lock lock(mutex);
      for (auto& item : queues) all.push_back(item.first);
    }
    ++num_waits, ++num_synchronised;
    for (auto id : all) wait_for(id, queues[id].queued, false);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    Lock lock(mutex);
    auto found = blocks.find(static_cast<char*>(data.get()));
    if (found != blocks.end()) found->second.users.push_back(stream.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex device) const override { current = device; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? current : std::exchange(current, device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current : device);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* pointer) const override {
    Lock lock(mutex);
    for (auto& [memory, size] : pinned)
      if (pointer >= memory && pointer < memory + size) return true;
    return false;
  }
  Device getDeviceFromPtr(void* pointer) const override {
    Lock lock(mutex);
    auto found = blocks.upper_bound(static_cast<char*>(pointer));
    return {kType, found == blocks.begin() ? DeviceIndex(0) : std::prev(found)->second.device};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    const c10::DeviceGuard guard(storage.device());
    auto fresh = device_allocator.allocate(size);
    if (storage.nbytes() && size) std::memcpy(fresh.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

[[maybe_unused]] const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(kType, &device_allocator);
  return true;
}();
}  // namespace

extern "C" {
PyObject* late_generator(int device) { return THPGenerator_initDefaultGenerator(default_generator(device)); }
uint64_t late_waits() { return num_waits; }  // times that this thread has waited for a device
uint64_t late_operations() { Lock lock(mutex); return num_operations; }
uint64_t late_allocated() { Lock lock(mutex); return allocated; }
void late_set_limit(uint64_t bytes) { Lock lock(mutex); limit = bytes; }
void late_set_patience(uint64_t milliseconds) { Lock lock(mutex); patience = milliseconds; }
void late_set_lateness(uint64_t operations, uint64_t seed) {  // 0: as late as can be
  Lock lock(mutex);
  lateness = operations;
  random_engine.seed(seed);
}
}
