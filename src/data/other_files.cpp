#include "data/other_files.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstring>
#include <filesystem>

namespace zg {
namespace {

using namespace std::string_view_literals;

// {0}: the path, {1}: the path without its last ending.
constexpr const char* kParquet =
    "python3 -c \"import pandas; pandas.read_parquet('{0}').to_json('{1}.jsonl', orient='records', "
    "lines=True)\" makes documents of it";
constexpr const char* kFeather =
    "python3 -c \"import pandas; pandas.read_feather('{0}').to_json('{1}.jsonl', orient='records', "
    "lines=True)\" makes documents of it";
constexpr const char* kArrow =
    "python3 -c \"import datasets; datasets.Dataset.from_file('{0}').to_json('{1}.jsonl')\" makes documents "
    "of it";
constexpr const char* kArray =
    "python3 -c \"import numpy; numpy.load('{0}').astype('uint16').tofile('{1}.bin')\" makes a token file of "
    "it (uint32 with data.token_dtype for ids above 65535)";
constexpr const char* kArrays =
    "python3 -c \"import numpy; z = numpy.load('{0}'); z[z.files[0]].astype('uint16').tofile('{1}.bin')\" "
    "makes a token file of its first array";
constexpr const char* kModel =
    "this holds weights of a model, not data: model.from names a model's directory";
constexpr const char* kPickle =
    "load it with the program that wrote it, and write documents, a line {{\"text\": ...}} each, into a "
    ".jsonl";
constexpr const char* kTable =
    "read it with the program that wrote it (Python: h5py, sqlite3), and write documents, a line "
    "{{\"text\": ...}} each, into a .jsonl";
constexpr const char* kPdf = "pdftotext '{0}' '{1}.txt' takes the text out of it";
constexpr const char* kPictures = "a text, documents (.jsonl) or tokens (.bin) are read";
constexpr const char* kOffice = "save it as plain text from the program that wrote it";
constexpr const char* kRtf = "soffice --convert-to txt:Text '{0}' makes a text of it";

struct Mark {
  std::size_t at;
  std::string_view bytes;
  const char *name, *convert;
  bool plain = false;  // letters alone, with which a text may begin: a zero byte must be near, too
};

constexpr Mark kMarks[] = {
    {0, "PAR1"sv, "a Parquet file", kParquet, true},
    {0, "ARROW1\0\0"sv, "an Arrow or Feather file", kFeather},
    {0, "FEA1"sv, "a Feather file", kFeather, true},
    {0, "ORC"sv, "an ORC file", kTable, true},
    {0, "Obj\x01"sv, "an Avro file", kTable},
    {0, "\x28\xb5\x2f\xfd"sv, "compressed by zstd", "zstd -d '{0}' unpacks it"},
    {0,
     "\xfd"
     "7zXZ\0"sv,
     "compressed by xz", "xz -dk '{0}' unpacks it"},
    {0, "\x04\x22\x4d\x18"sv, "compressed by lz4", "lz4 -d '{0}' unpacks it"},
    {0, "7z\xbc\xaf\x27\x1c"sv, "a 7z archive", "7z x '{0}' unpacks it"},
    {0, "Rar!\x1a\x07"sv, "a RAR archive", "unrar x '{0}' unpacks it"},
    {257, "ustar"sv, "a tar archive", "tar -xf '{0}' unpacks it"},
    {0, "\x93NUMPY"sv, "an array of NumPy (.npy)", kArray},
    {0, "\x89HDF\r\n\x1a\n"sv, "an HDF5 file", kTable},
    {0, "SQLite format 3\0"sv, "a database of SQLite", kTable},
    {0, "%PDF-"sv, "a PDF", kPdf},
    {0, "{\\rtf"sv, "a rich text (RTF)", kRtf},
    {0, "\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"sv, "a document of an old office program", kOffice},
    {0, "GGUF"sv, "a GGUF model", kModel, true},
    {0, "MMIDIDX\0\0"sv, "the index of a Megatron data set", "name its NAME.bin, beside which it lies"},
    {0, "TNTIDX\0\0"sv, "the index of an old Megatron data set",
     "Megatron's tools/preprocess_data.py makes the form that is read"},
    {0, "\x89PNG\r\n\x1a\n"sv, "a PNG picture", kPictures},
    {0, "GIF89a"sv, "a GIF picture", kPictures, true},
    {0, "GIF87a"sv, "a GIF picture", kPictures, true},
    {0, "II*\0"sv, "a TIFF picture", kPictures},
    {0, "MM\0*"sv, "a TIFF picture", kPictures},
    {4, "ftyp"sv, "a video", kPictures, true},
    {8, "WAVE"sv, "a sound", kPictures, true},
    {8, "WEBP"sv, "a WebP picture", kPictures, true},
    {0, "OggS\0"sv, "a sound", kPictures},
    {0, "fLaC\0"sv, "a sound", kPictures},
    {0,
     "\x7f"
     "ELF"sv,
     "a program", kPictures},
};

std::string lower_ending(const std::string& path) {
  std::string ending = std::filesystem::path(path).extension().string();
  std::transform(ending.begin(), ending.end(), ending.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return ending;
}

bool has(std::string_view head, std::size_t at, std::string_view bytes) {
  return head.size() >= at + bytes.size() && head.substr(at, bytes.size()) == bytes;
}

OtherFile made(const std::string& path, const char* name, const char* convert) {
  const std::string stem = std::filesystem::path(path).replace_extension().string();
  return {name, fmt::format(fmt::runtime(convert), path, stem)};
}

// A header's length (8 bytes), and then a JSON object of so many bytes.
bool is_safetensors(std::string_view head) {
  std::uint64_t length = 0;
  if (head.size() < 10) return false;
  std::memcpy(&length, head.data(), 8);
  return length >= 2 && length < (std::uint64_t{1} << 32) && (has(head, 8, "{\"") || has(head, 8, "{}"));
}

// Python's pickles of protocols 2 to 5; as tokens only with the frame or the number of PyTorch behind it.
bool is_pickle(std::string_view head, bool text) {
  if (head.size() < 11 || head[0] != '\x80' || head[1] < 2 || head[1] > 5) return false;
  if (text) return true;
  return (head[2] == '\x95' && head.substr(7, 4) == "\0\0\0\0"sv) ||
         has(head, 2, "\x8a\x0a\x6c\xfc\x9c\x46"sv);
}

bool is_gzip(std::string_view head) {
  return head.size() >= 4 && has(head, 0, "\x1f\x8b\x08"sv) && static_cast<unsigned char>(head[3]) < 0x20;
}

OtherFile archive(const std::string& path) {
  const std::string ending = lower_ending(path);
  if (ending == ".npz") return made(path, "arrays of NumPy (.npz)", kArrays);
  if (ending == ".pt" || ending == ".pth" || ending == ".ckpt" || ending == ".bin")
    return made(path, "a zip archive, as PyTorch and NumPy write them (.pt, .npz)",
                "write its token ids with numpy: ids.astype('uint16').tofile('{1}.bin')");
  if (ending == ".docx" || ending == ".odt" || ending == ".xlsx" || ending == ".ods" || ending == ".epub")
    return made(path, "a document of an office program", kOffice);
  return made(path, "a zip archive", "unzip '{0}' unpacks it");
}

}  // namespace

std::optional<OtherFile> other_file(const std::string& path, std::string_view head, std::string_view tail,
                                    bool text) {
  if (has(head, 0, "version https://git-lfs"))
    return OtherFile{"a pointer of Git LFS in place of the file", "git lfs pull fetches the file"};
  if (has(head, 0, "PK\x03\x04"sv) || has(head, 0, "PK\x05\x06"sv)) return archive(path);
  const bool tar = path.find(".tar.") != path.npos || lower_ending(path) == ".tgz";
  if (is_gzip(head))
    return made(path, "compressed by gzip", tar ? "tar -xzf '{0}' unpacks it" : "gzip -dk '{0}' unpacks it");
  if (has(head, 0, "BZh") && has(head, 4, "1AY&SY"))
    return made(path, "compressed by bzip2",
                tar ? "tar -xjf '{0}' unpacks it" : "bzip2 -dk '{0}' unpacks it");
  if (is_safetensors(head)) return made(path, "a safetensors file", kModel);
  if (is_pickle(head, text)) return made(path, "a pickle, as Python and PyTorch write them", kPickle);
  if (has(head, 0, "\xff\xd8\xff"sv) && head.size() > 3 && static_cast<unsigned char>(head[3]) >= 0xc0)
    return made(path, "a JPEG picture", kPictures);
  if (text && has(head, 0, "\xff\xff\xff\xff"sv)) return made(path, "a stream of Arrow", kArrow);
  const bool zeros = head.substr(0, 4096).find('\0') != head.npos;
  for (const Mark& mark : kMarks) {
    if (!has(head, mark.at, mark.bytes)) continue;
    if (mark.plain && !zeros && tail != mark.bytes) continue;
    return made(path, mark.name, mark.convert);
  }
  return {};
}

}  // namespace zg
