// A device named "cuda" for a torch that was built for the CPU: its memory is the host's, its kernels are the CPU's.
//
// Such a torch has all slots for CUDA, only empty: a device guard, an allocator, hooks, a dispatch key. This fills them,
// and tells an observer in Python what a GPU would have to do in which order.
#include <torch/extension.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace fake {
using namespace at;
using Guarded = std::lock_guard<std::mutex>;

constexpr size_t PAGE = 4096;
constexpr size_t TOTAL = size_t(8) << 30;  // what each device says that it has
constexpr int MOST_DEVICES = 16;

int device_count = 1;
bool protects = false;              // whether only kernels may touch device memory
std::atomic<bool> traces{false};    // whether the observer hears of more than waits
py::function* observer = nullptr;
thread_local DeviceIndex current = 0;
thread_local int depth = 0;         // how many kernels of this device are running in this thread
thread_local std::map<DeviceIndex, StreamId> streams;

struct InKernel {
  InKernel() { ++depth; }
  ~InKernel() { --depth; }
};

DeviceIndex or_current(DeviceIndex index) { return index < 0 ? current : index; }

// One number for the streams of all devices.
int64_t stream_number(DeviceIndex device, StreamId id) { return int64_t(device) * 1000 + id; }
int64_t current_stream() { return stream_number(current, streams[current]); }

template <typename... Values>
void tell(const char* what, Values&&... values) {
  if (!observer || !Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  py::error_scope keeps;  // memory is also freed while an error is on its way
  (*observer)(what, std::forward<Values>(values)...);
}
void waits(const std::string& why) {  // the host waits for the device
  if (!depth) tell("wait", why);
}

// ------------------------------------------------------------------ memory

struct Block {
  size_t size;
  int users;       // kernels that are touching it
  int64_t stream;  // on which it may be taken again without a wait
};
std::map<char*, Block> blocks;
std::mutex blocks_lock;
size_t allocated = 0, peak = 0, limit = TOTAL;

size_t whole_pages(size_t size) { return (std::max<size_t>(size, 1) + PAGE - 1) / PAGE * PAGE; }

void release(void* data) {
  int64_t stream;
  {
    Guarded guard(blocks_lock);
    auto found = blocks.find(static_cast<char*>(data));
    if (found == blocks.end()) return;
    stream = found->second.stream;
  }
  if (traces) tell("free", size_t(data), stream);  // before the address can come again
  Guarded guard(blocks_lock);
  auto found = blocks.find(static_cast<char*>(data));
  allocated -= found->second.size;
  munmap(data, whole_pages(found->second.size));
  blocks.erase(found);
}

struct DeviceMemory final : c10::DeviceAllocator {
  DataPtr allocate(size_t size) override {
    Device device(kCUDA, current);
    if (!size) return {nullptr, nullptr, &release, device};
    if (allocated + size > limit) throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, "CUDA out of memory (fake device)");
    void* data = mmap(nullptr, whole_pages(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(data != MAP_FAILED, "mmap failed (fake device)");
    memset(data, 0xFF, size);  // what somebody has left: not a number
    if (protects) mprotect(data, whole_pages(size), PROT_NONE);
    {
      Guarded guard(blocks_lock);
      blocks[static_cast<char*>(data)] = {size, 0, current_stream()};
      allocated += size;
      peak = std::max(peak, allocated);
    }
    if (traces) tell("allocate", size_t(data));
    return {data, data, &release, device};
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(MempoolId_t) override {}
  void recordStream(const DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override { return {}; }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override { peak = allocated; }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex) override { return {TOTAL - allocated, TOTAL}; }
};
DeviceMemory device_memory;

char* memory_of(const Tensor& tensor) {
  return static_cast<char*>(tensor.storage().unsafeGetStorageImpl()->mutable_data());
}

class Touching {  // what a kernel may touch while it runs
 public:
  Touching(std::initializer_list<Tensor> tensors) {
    for (const auto& tensor : tensors) add(memory_of(tensor));
  }
  Touching(char* first, char* second) { add(first), add(second); }
  ~Touching() {
    Guarded guard(blocks_lock);
    for (char* data : opened_) {
      auto found = blocks.find(data);
      if (found != blocks.end() && --found->second.users == 0) mprotect(data, whole_pages(found->second.size), PROT_NONE);
    }
  }

 private:
  void add(char* data) {
    if (!protects || !data) return;
    Guarded guard(blocks_lock);
    auto found = blocks.find(data);
    if (found == blocks.end()) return;
    if (found->second.users++ == 0) mprotect(data, whole_pages(found->second.size), PROT_READ | PROT_WRITE);
    opened_.push_back(data);
  }
  std::vector<char*> opened_;
};

std::map<char*, size_t> pinned;
std::mutex pinned_lock;

void unpin(void* data) {
  {
    Guarded guard(pinned_lock);
    pinned.erase(static_cast<char*>(data));
  }
  free(data);
}

struct PinnedMemory final : c10::Allocator {
  DataPtr allocate(size_t size) override {
    size = std::max<size_t>(size, 64);
    void* data = nullptr;
    TORCH_CHECK(!posix_memalign(&data, 64, size), "no pinned memory (fake device)");
    memset(data, 0xFF, size);
    Guarded guard(pinned_lock);
    pinned[static_cast<char*>(data)] = size;
    return {data, data, &unpin, Device(kCPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
PinnedMemory pinned_memory;

bool is_pinned(const void* data) {
  Guarded guard(pinned_lock);
  auto found = pinned.upper_bound(static_cast<char*>(const_cast<void*>(data)));
  if (found == pinned.begin()) return false;
  --found;
  return data < found->first + found->second;
}

// ------------------------------------------------------------------ what the device has still to do

struct LateCopy {  // to pinned memory, which has other bytes until the host waits
  Tensor host, value;
};
struct LateRead {  // of pinned memory, which must keep its bytes until the host waits
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  Tensor bytes;
  size_t hash;
};
std::vector<LateCopy> late_copies;
std::vector<LateRead> late_reads;
std::mutex late_lock;

size_t hash_of(const Tensor& host) {
  return std::hash<std::string_view>{}({static_cast<const char*>(host.const_data_ptr()), host.nbytes()});
}

std::atomic<int64_t> busy_for{0};  // nanoseconds of kernels that only sleep

void finish() {
  std::this_thread::sleep_for(std::chrono::nanoseconds(busy_for.exchange(0)));
  std::vector<LateCopy> copies;
  std::vector<LateRead> reads;
  {
    Guarded guard(late_lock);
    copies.swap(late_copies);
    reads.swap(late_reads);
  }
  {
    InKernel kernel;
    NoGradGuard no_grad;
    for (auto& copy : copies) copy.host.copy_(copy.value);
  }
  for (auto& read : reads)
    if (read.storage.lock() && hash_of(read.bytes) != read.hash)
      tell("hazard", "pinned memory was changed while the device could still read it");
}

// ------------------------------------------------------------------ streams and events

struct Event {
  std::chrono::steady_clock::time_point time;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kCUDA; }
  Device exchangeDevice(Device device) const override {
    Device before(kCUDA, current);
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(kCUDA, current); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < device_count, "CUDA error: invalid device ordinal (fake device)");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override { current = or_current(device.index()); }
  Stream stream(Device device, StreamId id) const { return Stream(Stream::UNSAFE, Device(kCUDA, or_current(device.index())), id); }
  Stream getStream(Device device) const override { return stream(device, streams[or_current(device.index())]); }
  Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<StreamId> next{1};
    return stream(device, next++);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream chosen) const override {
    Stream before = getStream(chosen.device());
    streams[chosen.device_index()] = chosen.id();
    return before;
  }
  static int64_t number(const Stream& of) { return stream_number(of.device_index(), of.id()); }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const Stream& on, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event();
    static_cast<Event*>(*event)->time = std::chrono::steady_clock::now();
    if (traces) tell("record", size_t(*event), number(on));
  }
  void block(void* event, const Stream& on) const override {
    if (traces && event) tell("block", size_t(event), number(on));
  }
  bool queryEvent(void*) const override { return true; }
  DeviceIndex deviceCount() const noexcept override { return device_count; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& of) const override {
    finish();
    if (traces) tell("synchronize stream", number(of));
    waits("synchronize a stream");
  }
  void synchronizeEvent(void* event) const override {
    finish();
    if (traces && event) tell("synchronize event", size_t(event));
    waits("synchronize an event");
  }
  void synchronizeDevice(DeviceIndex) const override { synchronize(); }
  static void synchronize() {
    finish();
    if (traces) tell("synchronize device");
    waits("synchronize the device");
  }
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    auto passed = static_cast<Event*>(second)->time - static_cast<Event*>(first)->time;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// ------------------------------------------------------------------ random numbers

struct DeviceGenerator final : at::CPUGeneratorImpl {
  explicit DeviceGenerator(DeviceIndex index) : CPUGeneratorImpl(default_rng_seed_val) {
    device_ = Device(kCUDA, index);
    key_set_ = DispatchKeySet(DispatchKey::CUDA);
  }
};

const Generator& default_generator(DeviceIndex index) {
  static std::vector<Generator> all = [] {
    std::vector<Generator> made;
    for (int number = 0; number < MOST_DEVICES; ++number) made.push_back(make_generator<DeviceGenerator>(number));
    return made;
  }();
  return all[or_current(index)];
}

class Drawing {  // the CPU's kernels draw from the CPU's generator, which has this device's state meanwhile
 public:
  explicit Drawing(Generator own) : guard_(lock_), own_(std::move(own)), cpu_(at::detail::getDefaultCPUGenerator()) {
    kept_ = cpu_.get_state();
    cpu_.set_state(own_.get_state());
  }
  ~Drawing() {
    own_.set_state(cpu_.get_state());
    cpu_.set_state(kept_);
  }

 private:
  static inline std::recursive_mutex lock_;
  std::unique_lock<std::recursive_mutex> guard_;
  Generator own_, cpu_;
  Tensor kept_;
};

struct Hooks final : CUDAHooksInterface {
  explicit Hooks(CUDAHooksArgs) {}
  void init() const override {}
  const Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  Generator getNewGenerator(DeviceIndex index) const override { return make_generator<DeviceGenerator>(or_current(index)); }
  Device getDeviceFromPtr(void*) const override { return Device(kCUDA, current); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex deviceCount() const override { return device_count; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current, or_current(index)); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  int getNumGPUs() const override { return device_count; }
  void deviceSynchronize(DeviceIndex) const override { Guard::synchronize(); }
};

// ------------------------------------------------------------------ kernels

using Addresses = std::vector<size_t>;
void launch(const std::string& name, const Addresses& read, const Addresses& written) {
  if (traces && !depth) tell("launch", name, current_stream(), read, written);
}

Tensor on_host(const Tensor& tensor) {  // the same bytes as a tensor of the CPU
  if (!tensor.is_cuda()) return tensor;
  auto options = tensor.options().device(kCPU).requires_grad(false);
  char* data = memory_of(tensor) + tensor.storage_offset() * tensor.element_size();
  auto same = at::from_blob(data, tensor.sizes(), tensor.strides(), [](void*) {}, options);
  if (tensor.is_conj()) same._set_conj(true);
  if (tensor.is_neg()) same._set_neg(true);
  return same;
}

// What a copy means for the host; true if it is late, and done.
bool begin_copy(Tensor& to, const Tensor& from, bool non_blocking) {
  if (depth) return false;
  Addresses read, written;
  if (from.is_cuda()) read.push_back(size_t(memory_of(from)));
  if (to.is_cuda()) written.push_back(size_t(memory_of(to)));
  launch("aten::copy_", read, written);
  if (to.is_cpu() && non_blocking && to.is_pinned() && to.is_contiguous()) {
    Tensor value;
    {
      InKernel kernel;
      Touching touching{from};
      value = on_host(from).clone();
    }
    memset(to.mutable_data_ptr(), 0xFF, to.nbytes());
    Guarded guard(late_lock);
    late_copies.push_back({to.detach(), value});
    return true;
  }
  if (from.is_cpu() && non_blocking && from.is_pinned() && from.is_contiguous() && from.numel()) {
    auto storage = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(from.storage().unsafeGetStorageImpl());
    auto bytes = at::from_blob(const_cast<void*>(from.const_data_ptr()), {int64_t(from.nbytes())}, at::kByte);
    Guarded guard(late_lock);
    late_reads.push_back({c10::weak_intrusive_ptr<c10::StorageImpl>(storage), bytes, hash_of(bytes)});
  } else if (to.is_cpu() || from.is_cpu()) {
    finish();
    waits(to.is_cpu() ? "copy to the host" : "copy from the host");
  }
  return false;
}

Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source) || begin_copy(self, source, non_blocking)) return self;
  InKernel kernel;
  Touching touching{self, source};
  at::AutoDispatchBelowADInplaceOrView below;
  auto target = on_host(self);
  target.copy_(on_host(source).expand_as(target));
  return self;
}

Tensor copy_from(const Tensor& source, const Tensor& to, bool non_blocking) {
  Tensor target = to;
  return copy(target, source, non_blocking);
}

void give_memory(c10::StorageImpl* storage, size_t size) {
  auto fresh = device_memory.allocate(size);
  {
    auto *from = static_cast<char*>(storage->mutable_data()), *to = static_cast<char*>(fresh.get());
    Touching touching(from, to);
    if (size_t kept = std::min(size, storage->nbytes())) memcpy(to, from, kept);
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(size);
}

void fit(const Tensor& self) {  // enough memory for its sizes
  auto need = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.element_size(), self.storage_offset());
  auto* storage = self.storage().unsafeGetStorageImpl();
  c10::DeviceGuard on(self.device());
  if (storage->nbytes() < need) give_memory(storage, need);
}

const Tensor& resize(const Tensor& self, IntArrayRef size, std::optional<MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != MemoryFormat::Contiguous && *format != MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  fit(self);
  return self;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& to) {
  if (to.sizes() != source.sizes()) to.resize_(source.sizes());
  return copy_from(source, to, false);
}

ScalarType or_default(std::optional<ScalarType> type) {
  return type.value_or(typeMetaToScalarType(at::get_default_dtype()));
}
constexpr DispatchKeySet KEYS(DispatchKey::CUDA);

Tensor empty(IntArrayRef size, std::optional<ScalarType> type, std::optional<Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<MemoryFormat> format) {
  c10::DeviceGuard on(device.value_or(Device(kCUDA)));
  return at::detail::empty_generic(size, &device_memory, KEYS, or_default(type), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> type, std::optional<Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard on(device.value_or(Device(kCUDA)));
  return at::detail::empty_strided_generic(size, stride, &device_memory, KEYS, or_default(type));
}

Scalar item(const Tensor& self) {
  if (!depth) {
    launch("aten::_local_scalar_dense", {size_t(memory_of(self))}, {});
    finish();
    waits("read a value");
  }
  InKernel kernel;
  Touching touching{self};
  return at::_local_scalar_dense(on_host(self));
}

Tensor& set_part(Tensor& self, Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.data()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  }
  fit(self);
  return self;
}
Tensor& set_storage(Tensor& self, Storage source) {
  int64_t count = source.nbytes() / self.element_size();
  return set_part(self, std::move(source), 0, {count}, {});
}
Tensor& set_tensor(Tensor& self, const Tensor& other) {
  return set_part(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}
Tensor& set_nothing(Tensor& self) {
  return set_part(self, Storage(Storage::use_byte_size_t(), 0, device_memory.allocate(0), &device_memory, true), 0, {0}, {});
}
void record_stream(Tensor&, Stream) {}

// Operators that take indices or lengths of the host.
const std::set<std::string> TAKES_BOTH = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index",
    "aten::_unsafe_index_put", "aten::_pack_padded_sequence", "aten::_pad_packed_sequence", "aten::_ctc_loss"};
// Operators whose result has a shape that follows from values.
const std::set<std::string> READS_VALUES = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim",
    "aten::equal", "aten::bincount", "aten::histc"};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const size_t count = schema.arguments().size(), begin = stack->size() - count;
  std::optional<Device> place, named;
  std::optional<Generator> generator;
  Addresses read, written;
  for (size_t number = 0; number < count; ++number) {
    auto& value = (*stack)[begin + number];
    const auto* alias = schema.arguments()[number].alias_info();
    auto look = [&](const Tensor& tensor) {
      if (!tensor.defined()) return;
      if (tensor.is_cuda()) (alias && alias->isWrite() ? written : read).push_back(size_t(memory_of(tensor)));
      if (depth || tensor.is_meta() || (tensor.is_cpu() && tensor.dim() == 0) || (TAKES_BOTH.count(name) && tensor.is_cpu())) return;
      if (!place) place = tensor.device();
      TORCH_CHECK(*place == tensor.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
                  *place, " and ", tensor.device(), "! (", name, ")");
    };
    if (value.isTensor()) look(value.toTensor());
    else if (value.isTensorList()) for (const Tensor& tensor : value.toTensorList()) look(tensor);
    else if (value.isOptionalTensorList()) for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) { if (tensor) look(*tensor); }
    else if (value.isDevice()) named = value.toDevice();
    else if (value.isGenerator()) {
      generator = value.toGenerator();
      TORCH_CHECK(generator->device().is_cuda(), "Expected a 'cuda' device type for generator but found '", generator->device().type(), "'");
      value = IValue();
    }
  }
  c10::OptionalDeviceGuard on;
  if (place && place->is_cuda()) on.reset_device(*place);
  else if (named && named->is_cuda()) on.reset_device(*named);
  const bool outermost = !depth;
  if (outermost && READS_VALUES.count(name)) {
    finish();
    waits(name);
  }
  {
    InKernel kernel;
    std::optional<Drawing> drawing;
    if (generator || op.hasTag(at::Tag::nondeterministic_seeded)) drawing.emplace(generator ? *generator : default_generator(-1));
    at::native::cpu_fallback(op, stack);
  }
  if (!outermost || !traces) return;
  for (size_t number = stack->size() - schema.returns().size(); number < stack->size(); ++number) {
    auto result = [&](const Tensor& tensor) { if (tensor.defined() && tensor.is_cuda()) written.push_back(size_t(memory_of(tensor))); };
    const auto& value = (*stack)[number];
    if (value.isTensor()) result(value.toTensor());
    else if (value.isTensorList()) for (const Tensor& tensor : value.toTensorList()) result(tensor);
  }
  launch(name, read, written);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("copy_", TORCH_FN(copy));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("_local_scalar_dense", TORCH_FN(item));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_part));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("record_stream", TORCH_FN(record_stream));
}

// ------------------------------------------------------------------ what Python needs

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(kCUDA, &device_memory, 2);
  // torch has noted that there is no CUDA while it was imported, in an object without members: only its type is wrong
  static Hooks hooks{CUDAHooksArgs{}};
  static_assert(sizeof(Hooks) == sizeof(CUDAHooksInterface));
  *reinterpret_cast<void**>(const_cast<CUDAHooksInterface*>(&at::detail::getCUDAHooks())) = *reinterpret_cast<void**>(&hooks);

  m.def("set_up", [](int devices, bool guarded, py::function told) {
    device_count = devices, protects = guarded, observer = new py::function(std::move(told));
  });
  m.def("trace", [](bool on) { traces = on; });
  m.def("finish", &finish);
  m.def("sleep", [](int64_t cycles) { busy_for += cycles; });
  m.def("current_stream", &current_stream);
  m.def("read", [](const Tensor& tensor) {  // as the device itself does
    InKernel kernel;
    Touching touching{tensor};
    return on_host(tensor).clone();
  });
  m.def("synchronize", &Guard::synchronize);
  m.def("current_device", [] { return int(current); });
  m.def("set_device", [](int index) { Guard().setDevice(Device(kCUDA, index)); });
  m.def("default_generator", [](int index) { return default_generator(index); });
  m.def("memory", [] { return std::make_pair(allocated, peak); });
  m.def("set_limit", [](double share) { limit = size_t(share * TOTAL); });
  m.def("reset_peak", [] { peak = allocated; });
  m.def("bytes", [](size_t size, int index) {
    c10::DeviceGuard on(Device(kCUDA, index));
    return Tensor(at::detail::empty_generic({int64_t(size)}, &device_memory, KEYS, kByte, std::nullopt));
  });
  m.def("resize_storage", [](const Tensor& of, size_t size) {
    c10::DeviceGuard on(of.device());
    give_memory(of.storage().unsafeGetStorageImpl(), size);
  });
}
}  // namespace fake
