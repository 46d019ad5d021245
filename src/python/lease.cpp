// Leases and pins for Python. A lease exposes its bytes by the buffer protocol and by DLPack. All such views
// share the lease, which ends no earlier than the last of them. A view may be destroyed on any thread,
// without the GIL, and after the interpreter has ended, so its deleter touches only C++ objects.
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>

#include <cerrno>
#include <vector>

#include "python/module.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::python {
namespace {

// A lease and its views.
struct HeldLease {
  Owned owned;
  std::shared_ptr<StoreHandle> store;
  Lease lease;
  DType dtype = DType::kU8;
  Access access = Access::kRead;
  std::int64_t shape = 0, stride = 1;  // in elements; DLPack points to them after the call
  Py_ssize_t buffer_shape = 0, buffer_stride = 0;
  std::atomic<int> views{0};
  bool guarded = false;

  bool writes() const { return access != Access::kRead; }
  // With protect_reads, the pages of segments acquired for reading are read-only while anybody reads them.
  // Segments begin at page boundaries and share no page.
  void protect() {
    if (!store->protect_reads || writes()) return;
    std::lock_guard lock(store->mutex);
    if (store->readers[lease.data()] == 0 && !allow(PROT_READ))
      throw Error(Errc::kMemory, "protect_reads", errno_text(errno),
                  "it is for looking for mistakes: leave it out");
    ++store->readers[lease.data()];
    guarded = true;
  }
  void unprotect() {
    if (!guarded) return;
    std::lock_guard lock(store->mutex);
    const auto readers = store->readers.find(lease.data());
    if (--readers->second > 0) return;
    store->readers.erase(readers);
    (void)allow(PROT_READ | PROT_WRITE);
  }
  bool allow(int protection) const {
    return mprotect(lease.data(), static_cast<std::size_t>(round_up(lease.bytes(), 4096)), protection) == 0;
  }
  void end() {
    if (!lease) return;
    unprotect();
    lease.release();
    store->leases.fetch_sub(1);
  }
  ~HeldLease() {
    if (owned.here()) {
      end();
    } else {
      new Lease(std::move(lease));  // leaked on purpose: the store belongs to the parent process
    }
  }
};

// A view's share of the lease.
struct ViewShare {
  std::shared_ptr<HeldLease> held;
  explicit ViewShare(std::shared_ptr<HeldLease> h) : held(std::move(h)) { held->views.fetch_add(1); }
  ~ViewShare() { held->views.fetch_sub(1); }
};

// Drops a share of a lease; call with the GIL held. The last share may destroy the store, too (drop()).
void drop_share(std::shared_ptr<HeldLease>& held) {
  std::shared_ptr<StoreHandle> store = held == nullptr ? nullptr : held->store;
  held.reset();
  if (store) drop(store);
}

struct PyLease {
  std::shared_ptr<HeldLease> held;

  explicit PyLease(std::shared_ptr<HeldLease> h) : held(std::move(h)) {}
  PyLease(PyLease&&) = default;
  ~PyLease() { drop_share(held); }

  HeldLease& open() const {
    held->owned.check_here("this lease");
    if (!held->lease) refuse("lease", "has been released", "acquire the segment again");
    return *held;
  }
};

// DLPack's structs (its ABI is fixed); the tensor struct comes from nanobind.
struct Managed {
  nb::dlpack::dltensor tensor;
  void* context = nullptr;
  void (*deleter)(Managed*) = nullptr;
};
struct ManagedVersioned {
  std::uint32_t major = 1, minor = 0;
  void* context = nullptr;
  void (*deleter)(ManagedVersioned*) = nullptr;
  std::uint64_t flags = 0;  // bit 0: read-only
  nb::dlpack::dltensor tensor;
};

nb::dlpack::dtype dlpack_type(DType dtype) {
  using Code = nb::dlpack::dtype_code;
  Code code = Code::Float;
  if (dtype == DType::kBF16) code = Code::Bfloat;
  if (dtype == DType::kI64 || dtype == DType::kI32) code = Code::Int;
  if (dtype == DType::kU16 || dtype == DType::kU8) code = Code::UInt;
  return {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(8 * size_of(dtype)), 1};
}

template <class M>
PyObject* capsule_of(HeldLease& held, std::shared_ptr<HeldLease> share, const char* name) {
  auto managed = std::make_unique<M>();
  nb::dlpack::dltensor& t = managed->tensor;
  t.data = held.lease.data();
  t.device = {1, 0};  // kDLCPU
  t.ndim = 1;
  t.dtype = dlpack_type(held.dtype);
  t.shape = &held.shape;
  t.strides = &held.stride;
  if constexpr (std::is_same_v<M, ManagedVersioned>) managed->flags = held.writes() ? 0 : 1;
  managed->context = new ViewShare(std::move(share));
  managed->deleter = [](M* m) {
    delete static_cast<ViewShare*>(m->context);
    delete m;
  };
  // A consumer renames the capsule, and calls the deleter itself.
  PyObject* capsule = PyCapsule_New(managed.get(), name, [](PyObject* c) {
    const char* unused = std::is_same_v<M, Managed> ? "dltensor" : "dltensor_versioned";
    if (PyCapsule_IsValid(c, unused) == 0) return;
    auto* m = static_cast<M*>(PyCapsule_GetPointer(c, unused));
    std::shared_ptr<HeldLease> last = static_cast<ViewShare*>(m->context)->held;
    m->deleter(m);
    drop_share(last);
  });
  if (capsule == nullptr) {
    managed->deleter(managed.release());
    throw nb::python_error();
  }
  (void)managed.release();
  return capsule;
}

nb::object dlpack(const PyLease& self, nb::kwargs options) {
  HeldLease& held = self.open();
  const auto given = [&](const char* name) -> nb::object {
    return options.contains(name) ? nb::object(options[name]) : nb::none();
  };
  if (const nb::object copy = given("copy"); !copy.is_none() && nb::cast<bool>(copy))
    throw nb::buffer_error("a lease shares its bytes; copy the array that shares them");
  if (const nb::object device = given("dl_device"); !device.is_none()) {
    if (nb::cast<int>(device[0]) != 1) throw nb::buffer_error("a lease's bytes are in host memory");
  }
  const nb::object version = given("max_version");
  if (!version.is_none() && nb::cast<int>(version[0]) >= 1)
    return nb::steal(capsule_of<ManagedVersioned>(held, self.held, "dltensor_versioned"));
  return nb::steal(capsule_of<Managed>(held, self.held, "dltensor"));
}

char* format_of(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return const_cast<char*>("d");
    case DType::kF32:
      return const_cast<char*>("f");
    case DType::kF16:
      return const_cast<char*>("e");
    case DType::kI64:
      return const_cast<char*>("q");
    case DType::kI32:
      return const_cast<char*>("i");
    case DType::kBF16:  // the buffer protocol has no code for bf16, so its bits are shown
    case DType::kU16:
      return const_cast<char*>("H");
    case DType::kU8:
      break;
  }
  return const_cast<char*>("B");
}

int get_buffer(PyObject* object, Py_buffer* view, int flags) {
  const PyLease& self = *nb::inst_ptr<PyLease>(nb::handle(object));
  HeldLease& held = *self.held;
  view->obj = nullptr;
  const char* refusal = nullptr;
  if (!held.owned.here())
    refusal = "this lease was made before this process was forked";
  else if (!held.lease)
    refusal = "this lease has been released";
  else if ((flags & PyBUF_WRITABLE) != 0 && !held.writes())
    refusal = "this lease was acquired for reading";
  if (refusal != nullptr) {
    PyErr_SetString(PyExc_BufferError, refusal);
    return -1;
  }
  view->buf = held.lease.data();
  view->len = static_cast<Py_ssize_t>(held.lease.bytes());
  view->itemsize = static_cast<Py_ssize_t>(size_of(held.dtype));
  view->readonly = held.writes() ? 0 : 1;
  view->ndim = 1;
  view->format = (flags & PyBUF_FORMAT) != 0 ? format_of(held.dtype) : nullptr;
  view->shape = (flags & PyBUF_ND) != 0 ? &held.buffer_shape : nullptr;
  view->strides = (flags & PyBUF_STRIDES) == PyBUF_STRIDES ? &held.buffer_stride : nullptr;
  view->suboffsets = nullptr;
  view->internal = new ViewShare(self.held);
  view->obj = nb::handle(object).inc_ref().ptr();
  return 0;
}

void release_buffer(PyObject*, Py_buffer* view) {
  auto* const share = static_cast<ViewShare*>(view->internal);
  std::shared_ptr<HeldLease> held = share->held;
  delete share;
  drop_share(held);
}

void release(const PyLease& self) {
  HeldLease& held = *self.held;
  held.owned.check_here("this lease");
  if (const int views = held.views.load(); views > 0 && held.lease) {
    const std::string text = fmt::format(
        "{} view{} of this lease {} still alive: delete the arrays, or copy them, before the "
        "lease ends",
        views, views == 1 ? "" : "s", views == 1 ? "is" : "are");
    throw nb::buffer_error(text.c_str());
  }
  WithoutGil released;
  held.end();
}

// Leaves a `with` block. If views are alive, the lease ends with the last of them.
void leave(PyLease& self, nb::args) {
  if (self.held->views.load() == 0) return release(self);
  auto closed = std::make_shared<HeldLease>();  // an ended lease, which this object refers to from now on
  closed->dtype = self.held->dtype;
  closed->access = self.held->access;
  self.held = std::move(closed);
}

PyType_Slot lease_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
                             {Py_bf_releasebuffer, reinterpret_cast<void*>(release_buffer)},
                             {0, nullptr}};

const char* mode_of(const HeldLease& held) {
  static constexpr const char* kNames[] = {"read", "write", "overwrite"};
  return kNames[static_cast<int>(held.access)];
}

}  // namespace

nb::object new_lease(std::shared_ptr<StoreHandle> store, Lease lease, DType dtype, Access access) {
  auto held = std::make_shared<HeldLease>();
  held->store = std::move(store);
  held->lease = std::move(lease);
  held->store->leases.fetch_add(1);
  held->dtype = dtype;
  held->access = access;
  {
    WithoutGil released(std::nothrow);
    held->protect();
  }
  held->shape = held->lease.bytes() / static_cast<std::int64_t>(size_of(dtype));
  held->buffer_shape = static_cast<Py_ssize_t>(held->shape);
  held->buffer_stride = static_cast<Py_ssize_t>(size_of(dtype));
  return nb::cast(PyLease{std::move(held)});
}

void bind_lease(nb::module_& m) {
  nb::class_<PyLease>(
      m, "Lease", nb::type_slots(lease_slots),
      "Access to the bytes of one segment, until it is released.\n\n"
      "A lease is a context manager. It shows its bytes to NumPy, torch and everybody else who\n"
      "knows the buffer protocol or DLPack, without a copy:\n\n"
      "    with tensor.acquire(mode=\"write\") as lease:\n"
      "        lease.numpy()[:] *= 2\n\n"
      "Views keep the lease alive: release() refuses (BufferError) while one lives, and a\n"
      "`with` block that ends before its views hands the lease over to them: it then ends with\n"
      "the last view. What is acquired for reading must not be written: NumPy's views are\n"
      "read-only; torch does not know read-only tensors, so there it is up to you.")
      .def_prop_ro(
          "nbytes", [](const PyLease& l) { return l.open().lease.bytes(); }, "Bytes of the segment.")
      .def_prop_ro(
          "dtype", [](const PyLease& l) { return zg::name_of(l.held->dtype); },
          "Type of the elements: \"f32\", \"bf16\", ...")
      .def_prop_ro(
          "mode", [](const PyLease& l) { return mode_of(*l.held); }, "read, write or overwrite.")
      .def_prop_ro("released", [](const PyLease& l) { return !l.held->lease; })
      .def_prop_ro(
          "views", [](const PyLease& l) { return l.held->views.load(); }, "Number of views alive.")
      .def_prop_ro(
          "address", [](const PyLease& l) { return reinterpret_cast<std::uintptr_t>(l.open().lease.data()); },
          "Address of the first byte, a multiple of 4096; valid until the lease ends.")
      .def("release", release,
           "Ends the lease; again does nothing. Raises BufferError while views of it are alive.")
      .def("__dlpack__", dlpack, "The bytes as a DLPack capsule: for torch.from_dlpack and others.")
      .def("__dlpack_device__", [](const PyLease&) { return nb::make_tuple(1, 0); })
      .def("__enter__", [](nb::object self) { return self; })
      .def("__exit__", leave)
      .def("__reduce__",
           [](const PyLease&) -> nb::object { throw nb::type_error("a lease cannot be pickled"); })
      .def("__repr__", [](const PyLease& l) {
        return l.held->lease ? fmt::format("<Lease {} of {} {} elements>", mode_of(*l.held), l.held->shape,
                                           zg::name_of(l.held->dtype))
                             : std::string("<Lease, released>");
      });
}

}  // namespace zg::python
