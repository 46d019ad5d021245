// The directory of a model is written anew at once: whoever opens it finds the old one or the new one, whole.
#include <sys/stat.h>

#include <set>

#include "train/checkpoint_fixture.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

class ModelDirectory : public CheckpointFixture {};

TEST_F(ModelDirectory, ADirectoryTakesAnothersPlaceAtOnce) {
  const std::string path = directory_ + "/model", link = directory_ + "/link";
  std::string part;
  ino_t fresh = 0;
  const auto inode = [](const std::string& of) {
    struct stat st {};
    EXPECT_EQ(::stat(of.c_str(), &st), 0) << of;
    return st.st_ino;
  };
  const auto write_model = [&](const std::string& directory) {
    part = directory;
    EXPECT_NE(directory, path);
    fs::create_directory(directory);
    test::write_file(directory + "/model.safetensors", "new");
    fresh = inode(directory);
  };
  const auto names = [&] {
    std::set<std::string> all;
    for (const auto& entry : fs::directory_iterator(path)) all.insert(entry.path().filename());
    return all;
  };
  replace_directory(path, write_model);
  EXPECT_EQ(names(), std::set<std::string>{"model.safetensors"});
  // Over another one, with what belongs to others, through a link.
  test::write_file(path + "/model.safetensors", "old");
  test::write_file(path + "/model-00001-of-00002.safetensors", "old");
  // Names that are like a model's, and that no save gives.
  const std::set<std::string> mine{"notes.txt", "model.safetensors.backup", "model-notes.safetensors.txt",
                                   "model-1-of-2.safetensors", "model.safetensors.index.json~"};
  for (const std::string& name : mine) test::write_file(path + "/" + name, "mine");
  fs::create_directory_symlink(path, link);
  EXPECT_THROW(replace_directory(link,
                                 [&](const std::string& directory) {
                                   write_model(directory);
                                   EXPECT_EQ(read(path + "/model.safetensors"), "old");
                                   throw Error(Errc::kIo, "", "full");
                                 }),
               Error);
  EXPECT_EQ(read(path + "/model.safetensors"), "old");
  EXPECT_FALSE(fs::exists(part));
  fs::create_directory(part);  // as a killed run leaves it
  test::write_file(part + "/model-00001-of-00001.safetensors", "torn");
  replace_directory(link, write_model);
  std::set<std::string> expected = mine;
  expected.insert("model.safetensors");
  EXPECT_EQ(names(), expected);
  EXPECT_EQ(read(path + "/model.safetensors"), "new");
  EXPECT_EQ(inode(path), fresh) << "it is the new directory that lies there now";
  EXPECT_TRUE(fs::is_symlink(link));
  EXPECT_FALSE(fs::exists(part));
  // A name alone, in the working directory.
  const fs::path before = fs::current_path();
  fs::current_path(directory_);
  EXPECT_NO_THROW(replace_directory("named", write_model));
  fs::current_path(before);
  EXPECT_EQ(read(directory_ + "/named/model.safetensors"), "new");
  EXPECT_NO_THROW(replace_directory(directory_ + "/deep/er/model", write_model));
  EXPECT_EQ(usage_error([&] {
              replace_directory(path + "/notes.txt", [](const std::string& directory) {
                throw Error(Errc::kUsage, directory, "is no directory");
              });
              return 0;
            }).where(),
            path + "/notes.txt");
}

}  // namespace
}  // namespace zg
