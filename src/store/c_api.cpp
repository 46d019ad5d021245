// ziggurat.h: errors, versions, and the store itself.
#include "store/c_api.hpp"

#include <algorithm>
#include <new>
#include <system_error>

#include "ziggurat/base/log.hpp"

namespace zg::c_api {
namespace {

// Sizes of the structs in the first version of the API, which every caller has at least.
constexpr std::size_t kConfigBytes = 88;
static_assert(sizeof(zg_store_config) == kConfigBytes,
              "a struct of ours changed without a new field at its end");

#define ZG_TEXT_OF_(x) #x
#define ZG_TEXT_OF(x) ZG_TEXT_OF_(x)
constexpr const char* kVersion =
    ZG_TEXT_OF(ZG_VERSION_MAJOR) "." ZG_TEXT_OF(ZG_VERSION_MINOR) "." ZG_TEXT_OF(ZG_VERSION_PATCH);
#undef ZG_TEXT_OF
#undef ZG_TEXT_OF_

std::string& last_error() {
  thread_local std::string text;
  return text;
}

// The last error where there was no memory for its text.
thread_local const char* last_resort = nullptr;

int remember(int status, const char* text) noexcept {
  try {
    last_error() = text;
    last_resort = nullptr;
  } catch (...) {
    last_resort = "no memory, not even for the text of the error";
  }
  return status;
}

int status_of(Errc code) {
  switch (code) {
    case Errc::kUsage:
      return ZG_USAGE;
    case Errc::kIo:
      return ZG_IO;
    case Errc::kMemory:
      return ZG_MEMORY;
    case Errc::kDevice:
    case Errc::kComm:  // a store has no other ranks
      return ZG_DEVICE;
    case Errc::kNumeric:
      return ZG_NUMERIC;
    case Errc::kInterrupted:
      return ZG_INTERRUPTED;
  }
  return ZG_BUG;
}

io::Backend backend_of(std::int32_t backend) {
  switch (backend) {
    case ZG_BACKEND_AUTO:
      return io::Backend::kAuto;
    case ZG_BACKEND_URING:
      return io::Backend::kUring;
    case ZG_BACKEND_LIBAIO:
      return io::Backend::kLibaio;
    case ZG_BACKEND_THREADS:
      return io::Backend::kThreads;
    case ZG_BACKEND_RAM:
      return io::Backend::kRam;
    default:
      refuse("backend", fmt::format("is {}", backend), "one of zg_backend");
  }
}

StoreConfig config_of(const zg_store_config& c) {
  constexpr std::uint32_t kFlags = ZG_REQUIRE_BACKEND | ZG_NO_VERIFY | ZG_NO_WRITE_AHEAD | ZG_RECORD;
  if ((c.flags & ~kFlags) != 0)
    refuse("flags", fmt::format("has unknown bits ({:#x})", c.flags & ~kFlags), "those of zg_store_flags");
  StoreConfig config;
  config.device_bytes = c.device_bytes;
  config.host_bytes = c.host_bytes;
  if (c.drive_count < 0 || c.drive_count > 4096)
    refuse("drive_count", fmt::format("is {}", c.drive_count),
           "the number of drive_paths and of drive_bytes");
  config.aio.backend = backend_of(c.backend);
  for (std::int32_t i = 0; i < c.drive_count; ++i) {
    const char* path = (&required(c.drive_paths, "drive_paths"))[i];
    if (path == nullptr && config.aio.backend != io::Backend::kRam)
      refuse(fmt::format("drive_paths[{}]", i), "is NULL", "name a directory on the drive");
    config.drives.push_back(
        {.path = path != nullptr ? path : "", .bytes = (&required(c.drive_bytes, "drive_bytes"))[i]});
  }
  config.aio.require = (c.flags & ZG_REQUIRE_BACKEND) != 0;
  config.aio.queue_depth = c.queue_depth;
  if (c.block_size != 0) config.aio.block_size = c.block_size;
  if (c.policy != nullptr) config.policy = c.policy;
  config.read_ahead = c.read_ahead;
  if (c.warn_after_seconds != 0) config.warn_after_seconds = c.warn_after_seconds;
  config.verify = (c.flags & ZG_NO_VERIFY) == 0;
  config.write_ahead = (c.flags & ZG_NO_WRITE_AHEAD) == 0;
  config.record = (c.flags & ZG_RECORD) != 0;
  return config;
}

}  // namespace

int failure() noexcept {
  try {
    throw;
  } catch (const Error& e) {
    return remember(status_of(e.code()), e.what());
  } catch (const std::bad_alloc&) {
    return remember(ZG_MEMORY, "the system refused memory");
  } catch (const std::system_error& e) {  // for example, no thread could be created
    const bool scarce =
        e.code() == std::errc::resource_unavailable_try_again || e.code() == std::errc::not_enough_memory;
    return remember(scarce ? ZG_MEMORY : ZG_IO, e.what());
  } catch (const std::exception& e) {
    return remember(ZG_BUG, e.what());
  } catch (...) {
    return remember(ZG_BUG, "an exception of unknown kind");
  }
}

void refuse(const std::string& where, const std::string& what, const std::string& hint) {
  throw Error(Errc::kUsage, where, what, hint);
}

void check_size(const char* name, std::size_t size, std::size_t least) {
  if (size < least || size > kLargestStruct)
    refuse(fmt::format("{}.size", name), fmt::format("is {}", size), "set it to sizeof the struct");
}

void check_unknown(const char* name, const char* rest, std::size_t bytes) {
  if (std::any_of(rest, rest + bytes, [](char c) { return c != 0; }))
    refuse(name, fmt::format("has fields that this library ({}) does not know", kVersion),
           "take a later library, or leave them 0");
}

void write_text(const std::string& text, char* buffer, std::size_t capacity, std::size_t* length) {
  if (capacity > 0) {
    const std::size_t n = std::min(text.size(), capacity - 1);
    std::memcpy(&required(buffer, "buffer"), text.data(), n);
    buffer[n] = '\0';
  }
  if (length != nullptr) *length = text.size();
}

Alone::Alone(zg_store* store, const char* call)
    : store_(required(store, "store")), lock_(store_.inside, std::try_to_lock) {
  if (!lock_.owns_lock())
    refuse(call, "another thread is inside a call with this store", "let it return first");
}

void Alone::no_leases_or_pins(const char* call) const {
  const std::size_t leases = store_.leases.size(), pins = store_.pins.size();
  if (leases + pins > 0)
    refuse(call,
           fmt::format("{} lease{} and {} pin{} of the store have not ended", leases, leases == 1 ? "" : "s",
                       pins, pins == 1 ? "" : "s"),
           "release them first (zg_release, zg_unpin)");
}

}  // namespace zg::c_api

using namespace zg::c_api;

int zg_version(void) {
  return ZG_VERSION;
}

const char* zg_version_text(void) {
  return kVersion;
}

const char* zg_last_error(void) {
  return last_resort != nullptr ? last_resort : last_error().c_str();
}

const char* zg_status_text(int status) {
  switch (status) {
    case ZG_OK:
      return "ok";
    case ZG_USAGE:
      return "usage";
    case ZG_IO:
      return "io";
    case ZG_MEMORY:
      return "memory";
    case ZG_DEVICE:
      return "device";
    case ZG_NUMERIC:
      return "numeric";
    case ZG_INTERRUPTED:
      return "interrupted";
    case ZG_BUG:
      return "bug";
    default:
      return "unknown";
  }
}

int zg_set_log_level(int level) {
  return guarded([&] {
    if (level < 0 || level > 3) refuse("level", fmt::format("is {}", level), "0 to 3");
    zg::log::set_level(static_cast<zg::log::Level>(level));
  });
}

int zg_store_open(const zg_store_config* config, zg_store** store) {
  return guarded([&] {
    cleared(store, "store");
    const zg_store_config c = read_struct(config, "config", kConfigBytes);
    auto made = std::make_unique<zg_store>();
    made->opened = zg::open_store(config_of(c));
    *store = made.release();
  });
}

int zg_store_close(zg_store* store) {
  if (store == nullptr) return ZG_OK;
  return guarded([&] {
    { Alone(store, "zg_store_close").no_leases_or_pins("zg_store_close"); }
    delete store;
  });
}
