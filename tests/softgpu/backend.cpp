// The device "softgpu" for torch: tensors in the memory of driver.c, ordered by its streams.
//
// A kernel is the CPU's kernel over tensors that alias the device memory through its shadow mapping. It runs on the calling
// thread after the current stream of the device has been drained, and that stream only: whoever uses another stream without
// an event or a wait meets the same races as on a GPU. Plain copies are enqueued and return at once.

#define AT_PER_OPERATOR_HEADERS
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

using at::IntArrayRef;
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::kPrivateUse1;

typedef struct CUctx_st* CUcontext;
typedef struct CUstream_st* CUstream;
typedef struct CUevent_st* CUevent;
typedef unsigned long long CUdeviceptr;
extern "C" {
int cuInit(unsigned);
int cuDeviceGetCount(int*);
int cuDevicePrimaryCtxRetain(CUcontext*, int);
int cuCtxSetCurrent(CUcontext);
int cuCtxGetDevice(int*);
int cuCtxSynchronize();
int cuMemAlloc_v2(CUdeviceptr*, size_t);
int cuMemFree_v2(CUdeviceptr);
int cuPointerGetAttribute(void*, int, CUdeviceptr);
int cuStreamCreate(CUstream*, unsigned);
int cuStreamQuery(CUstream);
int cuStreamSynchronize(CUstream);
int cuStreamWaitEvent(CUstream, CUevent, unsigned);
int cuEventCreate(CUevent*, unsigned);
int cuEventRecord(CUevent, CUstream);
int cuEventQuery(CUevent);
int cuEventSynchronize(CUevent);
int cuEventElapsedTime_v2(float*, CUevent, CUevent);
int cuEventDestroy_v2(CUevent);
int cuThreadExchangeStreamCaptureMode(int*);
void* softcuda_shadow(CUdeviceptr);
CUstream softcuda_default_stream(int);
int softcuda_drain(CUstream);
int softcuda_drain_device(int);
int softcuda_fill8(CUstream, CUdeviceptr, unsigned char, size_t);
int softcuda_torch_copy(CUdeviceptr, CUdeviceptr, size_t, CUstream);
void softcuda_torch_synchronized();
}

#define DRIVER(call)                                                         \
  do {                                                                      \
    int code_ = (call);                                                     \
    TORCH_CHECK(code_ == 0, "softgpu: " #call ": CUDA error ", code_);      \
  } while (0)

namespace {

constexpr int kDevices = 16, kPool = 32;
constexpr unsigned char kPoison = 0xDB;

CUdeviceptr address(const void* p) {
  return reinterpret_cast<CUdeviceptr>(p);
}

// Waits without the interpreter's lock, if this thread has it: torch keeps it where a GPU would not make it wait, and what is
// waited for may be a host function that needs it.
template <class Wait>
int unlocked(Wait wait) {
  static auto held = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  static auto save = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
  static auto restore = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
  static auto lives = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
  if (!held || !lives || !lives() || !held())
    return wait();
  void* thread = save();
  int code = wait();
  restore(thread);
  return code;
}

int drain(CUstream stream) {
  return unlocked([&] { return softcuda_drain(stream); });
}

int copy_async(void* to, const void* from, size_t n, CUstream stream) {  // waits if `to` is pageable
  return unlocked([&] { return softcuda_torch_copy(address(to), address(from), n, stream); });
}

// ---- devices and streams ----

struct Driver {
  int count = 0;
  CUcontext contexts[kDevices] = {};
  Driver() {
    if (cuInit(0) || cuDeviceGetCount(&count))
      count = 0;
    for (int i = 0; i < count; i++)
      cuDevicePrimaryCtxRetain(&contexts[i], i);
  }
};

Driver& driver() {
  static Driver* it = new Driver;  // never destroyed: tensors may be freed while the process ends
  return *it;
}

// The device is the one whose context is current in this thread, as the CUDA runtime has it; with none it is device 0.
int current_device() {
  int device = 0;
  return cuCtxGetDevice(&device) ? 0 : device;
}

void set_device(int device) {
  TORCH_CHECK(device >= 0 && device < driver().count, "softgpu: no device ", device);
  DRIVER(cuCtxSetCurrent(driver().contexts[device]));
}

int index_of(Device device) {
  return device.has_index() ? device.index() : current_device();
}

Device make_device(int index) {
  return Device(kPrivateUse1, static_cast<DeviceIndex>(index));
}

struct On {  // makes the context of a device current for a scope
  int before;
  explicit On(int device) : before(current_device()) {
    set_device(device);
  }
  ~On() {
    if (before < driver().count)
      cuCtxSetCurrent(driver().contexts[before]);
  }
};

// The id of a stream is its handle, and 0 for the default stream.
thread_local int64_t current_ids[kDevices];

Stream make_stream(int device, int64_t id) {
  return Stream(Stream::UNSAFE, make_device(device), id);
}

CUstream handle_of(int device, int64_t id) {
  return id ? reinterpret_cast<CUstream>(id) : softcuda_default_stream(device);
}

CUstream handle_of(const Stream& s) {
  return handle_of(s.device_index(), s.id());
}

CUstream current_stream(int device) {
  return handle_of(device, current_ids[device]);
}

// Streams come from a pool that is gone round, so that two that were asked for may be one, as with CUDA.
Stream pool_stream(int device) {
  static std::mutex lock;
  static CUstream pool[kDevices][kPool];
  static int next[kDevices];
  std::lock_guard<std::mutex> held(lock);
  CUstream& s = pool[device][next[device]++ % kPool];
  if (!s) {
    On on(device);
    DRIVER(cuStreamCreate(&s, 1));
  }
  return make_stream(device, reinterpret_cast<int64_t>(s));
}

CUevent record_new(int device, CUstream stream) {
  On on(device);
  CUevent event;
  DRIVER(cuEventCreate(&event, 0));
  DRIVER(cuEventRecord(event, stream));
  return event;
}

struct Relaxed {  // what the allocator does is no part of anybody's graph, and disturbs none
  int mode = 2;
  Relaxed() {
    cuThreadExchangeStreamCaptureMode(&mode);
  }
  ~Relaxed() {
    cuThreadExchangeStreamCaptureMode(&mode);
  }
};

bool is_over(int code) {
  if (code != 600)
    DRIVER(code);
  return code == 0;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kPrivateUse1;
  }
  Device exchangeDevice(Device d) const override {
    Device before = getDevice();
    set_device(index_of(d));
    return before;
  }
  Device getDevice() const override {
    return make_device(current_device());
  }
  void setDevice(Device d) const override {
    set_device(index_of(d));
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0 && d.index() < driver().count)
      cuCtxSetCurrent(driver().contexts[d.index()]);
  }
  DeviceIndex deviceCount() const noexcept override {
    return static_cast<DeviceIndex>(driver().count);
  }
  Stream getStream(Device d) const override {
    return make_stream(index_of(d), current_ids[index_of(d)]);
  }
  Stream getDefaultStream(Device d) const override {
    return make_stream(index_of(d), 0);
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override {
    return pool_stream(index_of(d));
  }
  Stream getNewStream(Device d, int) const override {
    return pool_stream(index_of(d));
  }
  Stream exchangeStream(Stream s) const override {
    Stream before = getStream(s.device());
    current_ids[s.device_index()] = s.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream s) const {  // overrides one that torch 2.10 does not have yet
    return reinterpret_cast<void*>(s.id());
  }
  bool queryStream(const Stream& s) const override {
    On on(s.device_index());
    return is_over(cuStreamQuery(handle_of(s)));
  }
  // What the user waits for is a call of the driver and counted there.
  void synchronizeStream(const Stream& s) const override {
    On on(s.device_index());
    DRIVER(cuStreamSynchronize(handle_of(s)));
  }
  void synchronizeDevice(const DeviceIndex index) const override {
    On on(index);
    DRIVER(cuCtxSynchronize());
  }
  void synchronizeEvent(void* event) const override {
    DRIVER(cuEventSynchronize(static_cast<CUevent>(event)));
  }
  void record(void** event, const Stream& s, const DeviceIndex index, const c10::EventFlag) const override {
    TORCH_CHECK(index == -1 || index == s.device_index(), "softgpu: an event is recorded on its own device");
    On on(s.device_index());
    if (!*event)
      DRIVER(cuEventCreate(reinterpret_cast<CUevent*>(event), 0));
    DRIVER(cuEventRecord(static_cast<CUevent>(*event), handle_of(s)));
  }
  void block(void* event, const Stream& s) const override {
    On on(s.device_index());
    if (event)
      DRIVER(cuStreamWaitEvent(handle_of(s), static_cast<CUevent>(event), 0));
  }
  bool queryEvent(void* event) const override {
    return !event || is_over(cuEventQuery(static_cast<CUevent>(event)));
  }
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    float ms;
    DRIVER(cuEventElapsedTime_v2(&ms, static_cast<CUevent>(a), static_cast<CUevent>(b)));
    return ms;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    if (event)
      cuEventDestroy_v2(static_cast<CUevent>(event));
  }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const Stream& s) const override;
};

// ---- memory ----

struct Block {
  int device;
  CUstream stream;  // whose order makes reuse safe
  char* ptr;
  size_t size;
  bool small;
  bool free = true;
  Block *before = nullptr, *after = nullptr;  // neighbours in the segment
  std::set<std::pair<int, CUstream>> users = {};
  std::vector<CUevent> events = {};
};

struct Smaller {
  bool operator()(const Block* a, const Block* b) const {
    return a->size != b->size ? a->size < b->size : a->ptr < b->ptr;
  }
};

// In the manner of CUDA's caching allocator: a freed block goes to the next request of the same stream at once, although the
// stream may still be working on it; a block that other streams were recorded for waits until they have come so far.
// What is free is poisoned in the order of the block's stream, so that a use after that shows.
struct Allocator final : c10::DeviceAllocator {
  std::mutex lock;
  std::map<std::tuple<int, CUstream, bool>, std::set<Block*, Smaller>> pools;
  std::unordered_map<void*, Block*> used;
  std::vector<Block*> waiting;  // freed, with events to come
  c10::CachingDeviceAllocator::DeviceStats stats[kDevices];

  static constexpr size_t kMiB = 1 << 20;

  c10::DataPtr allocate(size_t n) override {
    int device = current_device();
    if (!n)
      return {nullptr, make_device(device)};
    std::lock_guard<std::mutex> held(lock);
    collect();
    CUstream stream = current_stream(device);
    size_t size = (n + 511) / 512 * 512;
    bool small = size <= kMiB;
    auto& pool = pools[{device, stream, small}];
    Block key{device, stream, nullptr, size, small};
    auto found = pool.lower_bound(&key);
    Block* block = found == pool.end() ? segment(device, stream, size, small) : *found;
    if (found != pool.end())
      pool.erase(found);
    if (block->size - size >= (small ? 512 : kMiB + 1)) {
      Block* rest = new Block{device, stream, block->ptr + size, block->size - size, small};
      rest->before = block;
      rest->after = block->after;
      if (rest->after)
        rest->after->before = rest;
      block->after = rest;
      block->size = size;
      pool.insert(rest);
    }
    block->free = false;
    used[block->ptr] = block;
    stats[device].allocated_bytes[0].increase(block->size);
    stats[device].allocation[0].increase(1);
    return {block->ptr, block->ptr, &release, make_device(device)};
  }

  Block* segment(int device, CUstream stream, size_t size, bool small) {
    size_t whole = small ? 2 * kMiB : size < 10 * kMiB ? 20 * kMiB : (size + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB);
    On on(device);
    Relaxed relaxed;
    CUdeviceptr p = 0;
    if (cuMemAlloc_v2(&p, whole)) {
      trim();
      TORCH_CHECK_WITH(OutOfMemoryError, cuMemAlloc_v2(&p, whole) == 0, "softgpu: out of memory for ", whole, " bytes");
    }
    stats[device].reserved_bytes[0].increase(whole);
    softcuda_fill8(stream, p, kPoison, whole);  // new memory has no defined content either
    return new Block{device, stream, reinterpret_cast<char*>(p), whole, small};
  }

  void collect() {
    Relaxed relaxed;
    for (size_t i = 0; i < waiting.size();) {
      Block* block = waiting[i];
      while (!block->events.empty() && cuEventQuery(block->events.back()) == 0) {
        cuEventDestroy_v2(block->events.back());
        block->events.pop_back();
      }
      if (!block->events.empty()) {
        i++;
        continue;
      }
      waiting[i] = waiting.back();
      waiting.pop_back();
      give_back(block);
    }
  }

  void give_back(Block* block) {
    softcuda_fill8(block->stream, address(block->ptr), kPoison, block->size);
    auto& pool = pools[{block->device, block->stream, block->small}];
    block->free = true;
    if (Block* b = block->before; b && b->free) {
      pool.erase(b);
      b->size += block->size;
      join(b, block);
      block = b;
    }
    if (Block* a = block->after; a && a->free) {
      pool.erase(a);
      block->size += a->size;
      join(block, a);
    }
    pool.insert(block);
  }

  static void join(Block* left, Block* right) {
    left->after = right->after;
    if (left->after)
      left->after->before = left;
    delete right;
  }

  static void release(void* p);

  void put(void* p) {
    std::lock_guard<std::mutex> held(lock);
    auto found = used.find(p);
    if (found == used.end())
      return;
    Block* block = found->second;
    used.erase(found);
    stats[block->device].allocated_bytes[0].decrease(block->size);
    stats[block->device].allocation[0].decrease(1);
    for (auto& [device, stream] : block->users)
      block->events.push_back(record_new(device, stream));
    block->users.clear();
    waiting.push_back(block);
    collect();
  }

  void recordStream(const c10::DataPtr& ptr, Stream s) override {
    std::lock_guard<std::mutex> held(lock);
    auto found = used.find(ptr.get());  // memory of others is theirs to look after
    if (found != used.end() && found->second->stream != handle_of(s))
      found->second->users.insert({s.device_index(), handle_of(s)});
  }

  void trim() {
    collect();
    Relaxed relaxed;
    for (auto& [key, pool] : pools)
      for (auto it = pool.begin(); it != pool.end();) {
        Block* block = *it;
        if (block->before || block->after) {
          ++it;
          continue;
        }
        it = pool.erase(it);
        On on(block->device);
        cuMemFree_v2(address(block->ptr));
        stats[block->device].reserved_bytes[0].decrease(block->size);
        delete block;
      }
  }

  void emptyCache(c10::MempoolId_t) override {
    unlocked([] { return softcuda_drain_device(-1); });  // as giving memory back would, but not under our lock
    std::lock_guard<std::mutex> held(lock);
    trim();
  }

  bool initialized() override {
    return driver().count > 0;
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    std::lock_guard<std::mutex> held(lock);
    return stats[d];
  }
  void resetAccumulatedStats(DeviceIndex d) override {
    stats[d].allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(DeviceIndex d) override {
    stats[d].allocated_bytes[0].reset_peak();
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t n) const override {
    DRIVER(copy_async(to, from, n, current_stream(current_device())));
  }
};

Allocator& allocator() {
  static Allocator* it = new Allocator;
  return *it;
}

void Allocator::release(void* p) {
  try {
    allocator().put(p);
  } catch (const c10::Error&) {  // a forked child, or the end of the process: nobody is left to be told
  }
}

void Guard::recordDataPtrOnStream(const c10::DataPtr& ptr, const Stream& s) const {
  allocator().recordStream(ptr, s);
}

void grow(const c10::Storage& storage, size_t n) {
  On on(index_of(storage.device()));
  c10::DataPtr bigger = allocator().allocate(n);
  size_t keep = std::min(n, storage.nbytes());
  if (keep)
    DRIVER(copy_async(bigger.get(), storage.data(), keep, current_stream(current_device())));
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(bigger));
  storage.unsafeGetStorageImpl()->set_nbytes(n);
}

// ---- random numbers ----

// A face of a CPU generator: the default one is the CPU's default, so that a seed gives the CPU's numbers on the device too.
struct Generator final : c10::GeneratorImpl {
  at::Generator inner;
  Generator(int device, at::Generator g)
      : GeneratorImpl(make_device(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(std::move(g)) {}
  void set_current_seed(uint64_t seed) override {
    inner.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    inner.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return inner.get_offset();
  }
  uint64_t current_seed() const override {
    return inner.current_seed();
  }
  uint64_t seed() override {
    return inner.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  GeneratorImpl* clone_impl() const override {
    return new Generator(device_.index(), inner.clone());
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return driver().count > 0;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return static_cast<DeviceIndex>(driver().count);
  }
  void setCurrentDevice(DeviceIndex d) const override {
    set_device(d);
  }
  DeviceIndex getCurrentDevice() const override {
    return static_cast<DeviceIndex>(current_device());
  }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    DeviceIndex before = getCurrentDevice();
    if (d >= 0)
      set_device(d);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override {
    return exchangeDevice(d);
  }
  Device getDeviceFromPtr(void* p) const override {
    On on(current_device());
    int device;
    DRIVER(cuPointerGetAttribute(&device, 9, address(p)));
    return make_device(device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override {
    static auto* all = [] {
      auto* made = new std::vector<at::Generator>;
      for (int i = 0; i < driver().count; i++)
        made->push_back(at::make_generator<Generator>(i, at::detail::getDefaultCPUGenerator()));
      return made;
    }();
    return all->at(d < 0 ? current_device() : d);
  }
  at::Generator getNewGenerator(DeviceIndex d) const override {
    return at::make_generator<Generator>(d < 0 ? current_device() : d, at::detail::createCPUGenerator());
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    grow(storage, n);
  }
};

// ---- kernels ----

// One kernel: device tensors go in as CPU tensors over the same memory, results come back as device tensors.
struct Kernel {
  at::AutoDispatchBelowADInplaceOrView below;
  std::map<c10::StorageImpl*, c10::Storage> storages;  // of the device -> its alias
  std::vector<std::pair<Tensor, Tensor>> tensors;      // of the device, its alias
  int device = -1;

  Tensor in(const Tensor& t) {
    if (!t.defined() || !t.device().is_privateuseone())
      return t;
    for (auto& [real, alias] : tensors)
      if (real.is_same(t))
        return alias;
    TORCH_CHECK(device < 0 || device == t.device().index(),
                "Expected all tensors to be on the same device, but found at least two devices, softgpu:", device,
                " and ", t.device(), "!");
    device = t.device().index();
    auto* real = t.storage().unsafeGetStorageImpl();
    c10::Storage& storage = storages[real];
    if (!storage) {
      void* shadow = real->data() ? softcuda_shadow(address(real->data())) : nullptr;
      TORCH_CHECK(shadow || !real->data(), "softgpu: ", real->data(), " is no device memory");
      storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), real->nbytes(),
                                                      c10::DataPtr(shadow, c10::kCPU), c10::GetCPUAllocator(), true);
    }
    Tensor alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage),
                                                            c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
    auto* impl = alias.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    if (t.unsafeGetTensorImpl()->is_wrapped_number())
      impl->set_wrapped_number(true);
    if (t.is_conj())
      alias._set_conj(true);
    if (t.is_neg())
      alias._set_neg(true);
    tensors.emplace_back(t, alias);
    return alias;
  }

  void start() {
    if (device >= 0)
      DRIVER(drain(current_stream(device)));
  }

  // Outputs that the kernel gave another shape, and perhaps more memory than they had.
  void finish() {
    for (auto& [real, alias] : tensors) {
      if (alias.sizes() == real.sizes() && alias.strides() == real.strides())
        continue;
      c10::Storage given = alias.storage(), kept = real.storage();
      if (given.nbytes() > kept.nbytes()) {
        grow(kept, given.nbytes());
        start();
        memcpy(softcuda_shadow(address(kept.data())), given.data(), given.nbytes());
      }
      real.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }

  Tensor out(const Tensor& t) {
    if (!t.defined() || !t.device().is_cpu())
      return t;
    for (auto& [real, alias] : tensors)
      if (alias.is_same(t))
        return real;
    for (auto& [real, alias] : storages)
      if (t.has_storage() && t.storage().is_alias_of(alias)) {  // a view
        Tensor view = at::detail::make_tensor<c10::TensorImpl>(
            c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(real)),
            c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), t.dtype());
        view.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
        return view;
      }
    int target = device < 0 ? current_device() : device;
    Tensor made = at::empty_strided(t.sizes(), t.strides(), t.options().device(make_device(target)));
    size_t n = t.numel() ? at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize()) : 0;
    DRIVER(drain(current_stream(target)));  // the block may still be under its poison
    if (n)
      memcpy(softcuda_shadow(address(made.data_ptr())), t.const_data_ptr(), n);
    return made;
  }
};

// Operators that take tensors of the host beside tensors of the device. Elsewhere that is an error, as with CUDA.
bool mixes(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::index",         "aten::index_put_",            "aten::_index_put_impl_",
      "aten::_unsafe_index", "aten::_pack_padded_sequence", "aten::_ctc_loss"};
  return names.count(name) > 0;
}

// What is computed in double precision: as with CUDA, its bits are not those of the CPU.
bool in_double(const c10::OperatorHandle& op, const c10::IValue& first) {
  static const std::set<std::string> names = {"aten::mm",   "aten::addmm", "aten::bmm",          "aten::baddbmm",
                                              "aten::tanh", "aten::sum",   "aten::tanh_backward"};
  return names.count(op.schema().name()) > 0 && op.schema().arguments().back().is_out() && first.isTensor() &&
      first.toTensor().scalar_type() == at::kFloat;
}

void call_in_double(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Tensor out = stack->back().toTensor();
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); i++)
    if (c10::IValue& v = (*stack)[i]; v.isTensor())
      v = v.toTensor().to(at::kDouble);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  Tensor found = stack->back().toTensor();
  stack->back() = out.resize_(found.sizes()).copy_(found);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  size_t n = schema.arguments().size(), first = stack->size() - n;
  Kernel kernel;
  bool host = false;
  auto in = [&](const Tensor& t) {
    host |= t.defined() && t.device().is_cpu() && t.dim() > 0;
    return kernel.in(t);
  };
  for (size_t i = 0; i < n; i++) {
    c10::IValue& v = (*stack)[first + i];
    if (v.isTensor()) {
      v = in(v.toTensor());
    } else if (v.isTensorList()) {
      std::vector<Tensor> list = v.toTensorVector();
      for (Tensor& t : list)
        t = in(t);
      v = list;
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& t : v.toOptionalTensorVector())
        list.push_back(t ? std::optional<Tensor>(in(*t)) : t);
      v = list;
    } else if (v.isDevice() && v.toDevice().is_privateuseone()) {
      if (kernel.device < 0)
        kernel.device = index_of(v.toDevice());
      v = Device(c10::kCPU);
    } else if (v.isGenerator() && v.toGenerator().defined() && v.toGenerator().device().is_privateuseone()) {
      v = static_cast<Generator*>(v.toGenerator().unsafeGetGeneratorImpl())->inner;
    }
  }
  TORCH_CHECK(!host || kernel.device < 0 || mixes(schema.name()),
              "Expected all tensors to be on the same device, but found at least two devices, softgpu:", kernel.device,
              " and cpu! (", schema.name(), ")");
  kernel.start();
  if (in_double(op, (*stack)[first]))
    call_in_double(op, stack);
  else
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  kernel.finish();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    c10::IValue& v = (*stack)[i];
    if (v.isTensor()) {
      v = kernel.out(v.toTensor());
    } else if (v.isTensorList()) {
      std::vector<Tensor> list = v.toTensorVector();
      for (Tensor& t : list)
        t = kernel.out(t);
      v = list;
    }
  }
}

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  On on(index_of(c10::device_or_default(device)));
  return at::detail::empty_generic(size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  On on(index_of(c10::device_or_default(device)));
  return at::detail::empty_strided_generic(size, stride, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

void shape(const Tensor& t, IntArrayRef size, IntArrayRef stride, int64_t offset) {
  size_t n = stride.empty() && !size.empty()
      ? at::detail::computeStorageNbytesContiguous(size, t.itemsize(), offset)
      : at::detail::computeStorageNbytes(size, stride, t.itemsize(), offset);
  if (n > t.storage().nbytes())
    grow(t.storage(), n);
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty())
    impl->set_sizes_contiguous(size);
  else
    impl->set_sizes_and_strides(size, stride, offset);
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.sizes() != size)
    shape(self, size, {}, self.storage_offset());
  if (format)
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device(), "softgpu: set_ to a storage on ", source.device());
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  shape(self, size, stride, offset);
  return self;
}

Tensor& set_nothing(Tensor& self) {
  return set_storage(self, at::empty({0}, self.options()).storage(), 0, {0}, {});
}

at::Scalar local_scalar(const Tensor& self) {
  Kernel kernel;
  Tensor alias = kernel.in(self);
  softcuda_torch_synchronized();
  kernel.start();
  return at::native::_local_scalar_dense_cpu(alias);
}

// Copies between devices are ordered with the current streams of both, as in torch's own backend for CUDA.
void copy_bytes(const Tensor& from, const Tensor& to) {
  bool source = from.device().is_privateuseone(), target = to.device().is_privateuseone();
  int device = source ? from.device().index() : to.device().index();
  int other = source && target ? to.device().index() : device;
  CUstream stream = current_stream(device), peer = current_stream(other);
  On on(device);
  if (other != device) {
    CUevent ready = record_new(other, peer);
    DRIVER(cuStreamWaitEvent(stream, ready, 0));
    cuEventDestroy_v2(ready);
  }
  DRIVER(copy_async(to.data_ptr(), from.const_data_ptr(), from.numel() * from.itemsize(), stream));
  if (other != device) {
    CUevent done = record_new(device, stream);
    DRIVER(cuStreamWaitEvent(peer, done, 0));
    cuEventDestroy_v2(done);
  }
}

void wait_copied(int device) {
  softcuda_torch_synchronized();
  DRIVER(drain(current_stream(device)));
}

Tensor copy_from(const Tensor& source, const Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (!to.numel() || source.is_same(to))
    return to;
  Tensor from = source.sizes() == to.sizes() ? source : source.expand_as(to);
  bool same = from.device() == to.device();
  bool bytes = from.scalar_type() == to.scalar_type() && from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg() &&
      from.strides() == to.strides() && from.is_non_overlapping_and_dense();
  if (same && !bytes) {
    Kernel kernel;
    Tensor a = kernel.in(from), b = kernel.in(to);
    kernel.start();
    b.copy_(a);
    return to;
  }
  if (bytes) {
    copy_bytes(from, to);
  } else {  // cast and pack where the data is, unpack where they go
    Tensor packed = from.to(to.scalar_type()).resolve_conj().resolve_neg().contiguous();
    Tensor landed = to.is_contiguous() && !to.is_conj() && !to.is_neg() ? to : at::empty(to.sizes(), to.options());
    copy_bytes(packed, landed);
    if (!landed.is_same(to)) {
      if (!to.device().is_privateuseone())
        wait_copied(from.device().index());
      to.copy_(landed);
    }
  }
  if (!same && !non_blocking && !(from.device().is_privateuseone() && to.device().is_privateuseone()))
    wait_copied(from.device().is_privateuseone() ? from.device().index() : to.device().index());
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

void record_stream(Tensor& self, Stream s) {
  allocator().recordStream(self.storage().data_ptr(), s);
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups) {
  Kernel kernel;
  Tensor a = kernel.in(input), b = kernel.in(weight), c = bias ? kernel.in(*bias) : Tensor();
  kernel.start();
  return kernel.out(at::convolution(a, b, c.defined() ? std::optional<Tensor>(c) : std::nullopt, stride, padding, dilation,
                                    transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                        IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                                                        bool transposed, IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> mask) {
  Kernel kernel;
  Tensor g = kernel.in(grad), a = kernel.in(input), b = kernel.in(weight);
  kernel.start();
  int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  auto [x, y, z] = at::convolution_backward(g, a, b, IntArrayRef(channels), stride, padding, dilation, transposed,
                                            output_padding, groups, mask);
  return {kernel.out(x), kernel.out(y), kernel.out(z)};
}

int64_t attention_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return 0;  // by matrix products: the fused kernels are made for other devices
}

// The cells of recurrent layers, which torch expects a device to have in one piece. Made of operators with gradients, and
// registered above autograd, they need no backward of their own; the workspace for it stays empty.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden, const Tensor& cx,
                                             const std::optional<Tensor>& b1, const std::optional<Tensor>& b2) {
  Tensor sum = input + hidden;
  if (b1 && b1->defined())
    sum = sum + *b1 + *b2;
  auto gates = sum.chunk(4, 1);
  Tensor cy = gates[1].sigmoid() * cx + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * cy.tanh(), cy, at::empty({0}, cx.options())};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& hx,
                                    const std::optional<Tensor>& b1, const std::optional<Tensor>& b2) {
  bool biased = b1 && b1->defined();
  auto i = (biased ? input + *b1 : input).chunk(3, 1), h = (biased ? hidden + *b2 : hidden).chunk(3, 1);
  Tensor update = (i[1] + h[1]).sigmoid(), fresh = (i[2] + (i[0] + h[0]).sigmoid() * h[2]).tanh();
  return {(hx - fresh) * update + fresh, at::empty({0}, hx.options())};
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
}

// Without these the conjugate of a tensor would be resolved by a copy, which needs the conjugate resolved.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_", &set_nothing);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_fused_sdp_choice", &attention_choice);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

const bool registered = [] {
  c10::SetAllocator(kPrivateUse1, &allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

// For the Python module. The handle is never 0; the raw stream is what torch's stream gives to a driver: 0 for the default.
extern "C" __attribute__((visibility("default"))) void* softgpu_handle(int device) {
  return current_stream(device < 0 ? current_device() : device);
}

extern "C" __attribute__((visibility("default"))) int64_t softgpu_raw_stream(int device) {
  return current_ids[device < 0 ? current_device() : device];
}
