// The store for Python. Its methods take and return ids and names, which the class ziggurat.Store turns into
// objects.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <unistd.h>

#include <optional>
#include <tuple>
#include <vector>

#include "python/module.hpp"

namespace zg::python {
namespace {

constexpr int kMostPins = 200;  // most pins of one segment at one tier

struct PyPin {
  PyPin() = default;
  PyPin(PyPin&&) = default;
  // Ending the pin does not wait. Destroying the store may wait, if this was its last share.
  ~PyPin() {
    if (!held) return;
    std::shared_ptr<StoreHandle> store = held->store;
    held.reset();
    if (store) drop(store);
  }
  struct Held {
    Owned owned;
    std::shared_ptr<StoreHandle> store;
    Pin pin;
    std::pair<SegmentId, Tier> place;
    void end() {
      if (!pin) return;
      pin.release();
      store->pins.fetch_sub(1);
      std::lock_guard lock(store->mutex);
      if (const auto count = store->pinned.find(place); --count->second == 0) store->pinned.erase(count);
    }
    ~Held() {
      if (owned.here()) {
        end();
      } else {
        new Pin(std::move(pin));
      }
    }
  };
  std::unique_ptr<Held> held;
};

Access access_named(const std::string& mode) {
  if (mode == "read") return Access::kRead;
  if (mode == "write") return Access::kWrite;
  if (mode == "overwrite") return Access::kOverwrite;
  refuse("mode", "\"" + mode + "\" is none", "\"read\", \"write\" or \"overwrite\"");
}

Tier lowest_named(const std::string& name) {
  return name == "nvme" ? Tier::kNvme : memory_tier_named(name);
}

Role role_named(const std::string& name) {
  for (std::size_t r = 0; r < kRoles; ++r) {
    if (name == zg::name_of(static_cast<Role>(r))) return static_cast<Role>(r);
  }
  std::string known;
  for (std::size_t r = 0; r < kRoles; ++r)
    known += (r > 0 ? ", " : "") + std::string(zg::name_of(static_cast<Role>(r)));
  refuse("role", "\"" + name + "\" is none", "one of " + known);
}

io::Backend backend_named(const std::string& name) {
  if (const auto backend = io::backend_named(name)) return *backend;
  refuse("backend", "\"" + name + "\" is none", "auto, io_uring, libaio, threads or ram");
}

// The open stores, to be closed when the interpreter ends. Used with the GIL held.
class OpenStores {
 public:
  void remember(const std::shared_ptr<StoreHandle>& store) {
    std::erase_if(all_, [](const std::weak_ptr<StoreHandle>& s) { return s.expired(); });
    all_.push_back(store);
  }
  // If a thread is still inside a store, or leases and views live, the store's memory stays. Only its files
  // are unlinked; the store still has them open.
  void close() {
    const std::vector<std::weak_ptr<StoreHandle>> all = all_;
    for (const std::weak_ptr<StoreHandle>& one : all) {
      const std::shared_ptr<StoreHandle> store = one.lock();
      if (store == nullptr || !store->owned.here() || store->closed) continue;
      WithoutGil released;
      const Alone alone(released, *store);
      if (alone.owns() && store->leases.load() + store->pins.load() == 0) {
        store->close();
      } else {
        remove_names(store->opened->io());
      }
    }
  }

 private:
  static void remove_names(const io::Engine* io) {
    for (int d = 0; io != nullptr && d < io->drive_count(); ++d) {
      if (const std::string path = io->file(d); !path.empty()) unlink(path.c_str());
    }
  }
  std::vector<std::weak_ptr<StoreHandle>> all_;
};

OpenStores& open_stores() {
  static auto* stores = new OpenStores;
  return *stores;
}

Store open(std::int64_t host_bytes, const std::vector<std::pair<std::string, std::int64_t>>& drives,
           std::int64_t device_bytes, const std::string& policy, int queue_depth, const std::string& backend,
           bool require_backend, std::int64_t block_size, std::int64_t read_ahead, bool verify,
           bool write_ahead, bool protect_reads) {
  StoreConfig config;
  config.host_bytes = host_bytes;
  config.device_bytes = device_bytes;
  for (const auto& [path, bytes] : drives) config.drives.push_back({.path = path, .bytes = bytes});
  config.aio.backend = backend_named(backend);
  config.aio.require = require_backend;
  config.aio.queue_depth = queue_depth;
  config.aio.block_size = block_size;
  config.policy = policy;
  config.read_ahead = read_ahead;
  config.verify = verify;
  config.write_ahead = write_ahead;
  Store store(std::make_shared<StoreHandle>());
  store.handle->protect_reads = protect_reads;
  {
    WithoutGil released;
    store.handle->opened = open_store(config);
  }
  open_stores().remember(store.handle);
  return store;
}

void close(Store& self) {
  StoreHandle& h = *self.handle;
  h.owned.check_here("this store");
  WithoutGil released;
  const Alone alone(released, h);
  if (!alone.owns())
    refuse("Store.close", "another thread is inside a call with this store", "let it return first");
  if (h.opened == nullptr) return;
  if (h.leases.load() + h.pins.load() > 0)
    refuse("Store.close",
           fmt::format("{} leases (or views of them) and {} pins of the store are alive", h.leases.load(),
                       h.pins.load()),
           "release them, and delete the arrays that share their bytes");
  h.close();
}

TensorId add(Store& self, const std::string& name, const std::string& dtype, std::int64_t count,
             const std::string& role, std::int64_t segment_bytes, const std::string& lowest, int priority) {
  TensorSpec spec;
  spec.name = name;
  spec.dtype = dtype_named(dtype);
  spec.count = count;
  spec.role = role_named(role);
  spec.lowest = lowest_named(lowest);
  const auto size = static_cast<std::int64_t>(size_of(spec.dtype));
  if (segment_bytes < 0 || segment_bytes % size != 0)
    refuse("segment_bytes", fmt::format("is {}", segment_bytes),
           fmt::format("a multiple of {}, the bytes of an element; or 0 for one segment", size));
  if (priority < -100 || priority > 100) refuse("priority", fmt::format("is {}", priority), "-100 to 100");
  spec.segment_elements = segment_bytes / size;
  spec.priority = priority;
  WithoutGil released;
  return Alone(released, self.handle, "Store.add").store().add(spec);
}

void remove(Store& self, TensorId tensor) {
  waiting([&](const WithoutGil& released) {
    const Alone alone(released, self.handle, "Store.remove");
    const TensorTable& table = alone.store().table();
    if (tensor < 0 || tensor >= table.tensor_count() || table.tensor(tensor).removed) return;
    const Tensor& t = table.tensor(tensor);
    for (const SegmentReport& s : alone.store().report(tensor)) {
      const bool leased = s.readers[0] + s.readers[1] + s.writers[0] + s.writers[1] > 0;
      if (leased || s.pinned[0] || s.pinned[1])
        refuse(fmt::format("tensor \"{}\"", t.spec.name), "has leases or pins", "release them first");
    }
    alone.store().remove(tensor);
  });
}

nb::object acquire(Store& self, TensorId tensor, std::int32_t segment, const std::string& mode,
                   const std::string& tier) {
  const Access access = access_named(mode);
  const Tier at = memory_tier_named(tier);
  DType dtype = DType::kU8;
  Lease lease = waiting([&](const WithoutGil& released) {
    const Inside inside(released, self.handle);
    const SegmentId id = inside.segment(tensor, segment);
    dtype = inside.tensor(tensor).spec.dtype;
    return inside.store().acquire(id, at, access);
  });
  return new_lease(self.handle, std::move(lease), dtype, access);
}

using Wanted = std::tuple<TensorId, std::int32_t, std::string, std::string>;

nb::list acquire_all(Store& self, const std::vector<Wanted>& wanted) {
  std::vector<AccessStep> steps;
  std::vector<Lease> leases;
  std::vector<DType> dtypes;
  waiting([&](const WithoutGil& released) {
    const Inside inside(released, self.handle);
    for (const auto& [tensor, segment, mode, tier] : wanted) {
      AccessStep step;
      step.segment = inside.segment(tensor, segment);
      step.tier = memory_tier_named(tier);
      step.access = access_named(mode);
      steps.push_back(step);
      dtypes.push_back(inside.tensor(tensor).spec.dtype);
    }
    inside.store().acquire(steps, leases);
  });
  nb::list out;
  for (std::size_t i = 0; i < leases.size(); ++i)
    out.append(new_lease(self.handle, std::move(leases[i]), dtypes[i], steps[i].access));
  return out;
}

PyPin pin(Store& self, TensorId tensor, std::int32_t segment, const std::string& tier) {
  PyPin out;
  out.held = std::make_unique<PyPin::Held>();
  const Tier at = memory_tier_named(tier);
  waiting([&](const WithoutGil& released) {
    const Inside inside(released, self.handle);
    StoreHandle& h = inside.handle();
    out.held->place = {inside.segment(tensor, segment), at};
    {
      std::lock_guard lock(h.mutex);
      int& count = h.pinned[out.held->place];
      if (count >= kMostPins)
        refuse("Store.pin", fmt::format("the segment has {} pins at this tier", kMostPins), "release some");
      ++count;
    }
    try {
      out.held->pin = inside.store().pin(out.held->place.first, at);
    } catch (...) {
      std::lock_guard lock(h.mutex);
      if (const auto count = h.pinned.find(out.held->place); --count->second == 0) h.pinned.erase(count);
      throw;
    }
    h.pins.fetch_add(1);
  });
  out.held->store = self.handle;
  return out;
}

void step_begin(Store& self, const std::string& name) {
  WithoutGil released;
  const Inside inside(released, self.handle);
  std::lock_guard lock(inside.handle().mutex);
  if (inside.handle().in_step) refuse("Store.step", "the step before has not ended", "one step at a time");
  inside.store().step_begin(name);
  inside.handle().in_step = true;
}

void step_end(Store& self) {
  WithoutGil released;
  const Inside inside(released, self.handle);
  std::lock_guard lock(inside.handle().mutex);
  if (!inside.handle().in_step) refuse("Store.step", "no step has begun", "use `with store.step():`");
  inside.store().step_end();
  inside.handle().in_step = false;
}

nb::dict statistics(Store& self) {
  StoreStatistics s;
  {
    WithoutGil released;
    s = Inside(released, self.handle).store().statistics();
  }
  nb::dict out, tiers, links, causes;
  for (int t = 0; t < kTiers; ++t) {
    const TierStatistics& x = s.tiers[static_cast<std::size_t>(t)];
    nb::dict d;
    d["budget"] = x.budget, d["used"] = x.used, d["peak"] = x.peak, d["segments"] = x.segments;
    d["bytes"] = x.bytes, d["hits"] = x.hits, d["misses"] = x.misses, d["evictions"] = x.evictions;
    static constexpr const char* kNames[] = {"device", "host", "nvme"};
    tiers[kNames[t]] = d;
  }
  for (int l = 0; l < kLinks; ++l) {
    const LinkStatistics& x = s.links[static_cast<std::size_t>(l)];
    nb::dict d;
    d["bytes"] = x.bytes, d["transfers"] = x.transfers, d["busy_seconds"] = x.busy_seconds;
    d["moving"] = x.moving, d["waiting"] = x.waiting;
    static constexpr const char* kNames[] = {"to_device",  "to_host",     "nvme_read",
                                             "nvme_write", "direct_read", "direct_write"};
    links[kNames[l]] = d;
  }
  for (int c = 0; c < kWaitCauses; ++c)
    causes[zg::name_of(static_cast<WaitCause>(c))] = s.waited_for[static_cast<std::size_t>(c)];
  out["tiers"] = tiers, out["links"] = links, out["waited_for"] = causes;
  out["waits"] = s.waits, out["waited_seconds"] = s.waited_seconds, out["prefetches"] = s.prefetches;
  out["prefetched_in_vain"] = s.prefetched_in_vain, out["left_record"] = s.left_record;
  return out;
}

// Makes a Python method from a member of the store that takes one segment.
template <class Call>
auto on_segment(Call call) {
  return [call](Store& self, TensorId tensor, std::int32_t segment) {
    return waiting([&](const WithoutGil& released) {
      const Inside inside(released, self.handle);
      return call(inside.store(), inside.segment(tensor, segment));
    });
  };
}

template <class Call>
auto on_store(Call call) {
  return [call](Store& self) {
    return waiting([&](const WithoutGil& released) { return call(Inside(released, self.handle).store()); });
  };
}

void bind_pin(nb::module_& m) {
  const auto release = [](PyPin& p) {
    p.held->owned.check_here("this pin");
    WithoutGil released;
    p.held->end();
  };
  nb::class_<PyPin>(m, "Pin",
                    "Keeps a segment at a tier until it is released; a context manager.\n\n"
                    "All pins together must leave room for what is acquired.")
      .def("release", release, "Ends the pin; again does nothing.")
      .def_prop_ro("released", [](const PyPin& p) { return !p.held->pin; })
      .def("__enter__", [](nb::object self) { return self; })
      .def("__exit__", [release](PyPin& p, nb::args) { release(p); })
      .def("__reduce__", [](const PyPin&) -> nb::object { throw nb::type_error("a pin cannot be pickled"); });
}

}  // namespace

void bind_store(nb::module_& m) {
  at_exit([] { open_stores().close(); });
  bind_pin(m);
  nb::class_<Store>(m, "Store")
      .def_static("open", open, nb::arg("host_bytes"), nb::arg("drives"), nb::arg("device_bytes"),
                  nb::arg("policy"), nb::arg("queue_depth"), nb::arg("backend"), nb::arg("require_backend"),
                  nb::arg("block_size"), nb::arg("read_ahead"), nb::arg("verify"), nb::arg("write_ahead"),
                  nb::arg("protect_reads"))
      .def("close", close)
      .def("add", add)
      .def("remove", remove)
      .def("acquire", acquire)
      .def("acquire_all", acquire_all)
      .def("pin", pin)
      .def("step_begin", step_begin)
      .def("step_end", step_end)
      .def("statistics", statistics)
      .def("prefetch",
           [](Store& self, TensorId tensor, std::int32_t segment, const std::string& tier) {
             const Tier at = memory_tier_named(tier);
             waiting([&](const WithoutGil& released) {
               const Inside inside(released, self.handle);
               inside.store().prefetch(inside.segment(tensor, segment), at);
             });
           })
      .def("discard", on_segment([](TensorStore& s, SegmentId id) { s.discard(id); }))
      .def("has_content", on_segment([](TensorStore& s, SegmentId id) { return s.has_content(id); }))
      .def("segments",
           [](Store& self, TensorId t) {
             WithoutGil released;
             return Inside(released, self.handle).tensor(t).segments;
           })
      .def("drain", on_store([](TensorStore& s) { s.drain(); }))
      .def("demote",
           [](Store& self) {
             waiting([&](const WithoutGil& released) {
               const Alone alone(released, self.handle, "Store.demote");
               if (self.handle->leases.load() + self.handle->pins.load() > 0)
                 refuse("Store.demote", "leases or pins of the store are alive", "release them first");
               alone.store().demote_all();
             });
           })
      .def("state", on_store([](TensorStore& s) { return s.state(); }))
      .def("explain",
           [](Store& self, TensorId tensor) {
             return waiting([&](const WithoutGil& released) {
               const Inside inside(released, self.handle);
               (void)inside.tensor(tensor);
               return inside.store().explain(tensor);
             });
           })
      .def_prop_ro("leases", [](const Store& s) { return s.handle->leases.load(); })
      .def_prop_ro("pins", [](const Store& s) { return s.handle->pins.load(); })
      .def_prop_ro("closed", [](const Store& s) { return s.handle->closed.load(); })
      .def("__reduce__",
           [](const Store&) -> nb::object { throw nb::type_error("a store cannot be pickled"); });
}

}  // namespace zg::python
