# Installs the build into WORK, then configures, builds and runs projects of others against it: this folder's, the
# example of the I/O part, and requests for single components.
#   cmake -DBUILD=... -DWORK=... -DSOURCE=... -DEXAMPLE=... -DCXX=... -P run.cmake
function(step)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE text ERROR_VARIABLE text)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "${ARGN}\n${text}")
  endif()
  set(text "${text}" PARENT_SCOPE)
endfunction()
function(expect text pattern)
  if(NOT text MATCHES "${pattern}")
    message(FATAL_ERROR "expected ${pattern} in:\n${text}")
  endif()
endfunction()

set(configure ${CMAKE_COMMAND} -DCMAKE_PREFIX_PATH=${WORK}/prefix -DCMAKE_CXX_COMPILER=${CXX})
file(REMOVE_RECURSE ${WORK})
step(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)
step(${WORK}/prefix/bin/ziggurat --version)

step(${configure} -S ${SOURCE} -B ${WORK}/build)
step(${CMAKE_COMMAND} --build ${WORK}/build)
step(${WORK}/build/use)

# The example, away from the tree; of all that ziggurat uses, only what the I/O part needs is looked for.
file(COPY ${EXAMPLE}/ DESTINATION ${WORK}/example)
step(${configure} -S ${WORK}/example -B ${WORK}/example/build)
file(STRINGS ${WORK}/example/build/CMakeCache.txt found REGEX "^(URING_FOUND|HWLOC|HWY|DNNL|nlohmann_json)")
expect("${found}" "^URING_FOUND:INTERNAL=1$")
step(${CMAKE_COMMAND} --build ${WORK}/example/build)
file(MAKE_DIRECTORY ${WORK}/drive0 ${WORK}/drive1)
step(${WORK}/example/build/io_stream -n 6 -s 1000000 -b 4 ${WORK}/drive0 ${WORK}/drive1)
expect("${text}" "written .*read .*nvme0 .*drive0: wrote .*nvme1 .*drive1: wrote ")
file(GLOB left ${WORK}/drive?/*)
expect("${left}" "^$")

# Each component alone finds all that it links to; one that does not exist is refused with the names of those that do.
step(${configure} -DASK=base,io,kernels,device,store,optim,model,engine,plan,train -S ${SOURCE}/components
  -B ${WORK}/components)
execute_process(COMMAND ${configure} -DASK=tape -S ${SOURCE}/components -B ${WORK}/unknown
  RESULT_VARIABLE code OUTPUT_VARIABLE text ERROR_VARIABLE text)
expect("${code}" "^[1-9]")
string(REGEX REPLACE "[ \n]+" " " text "${text}")
expect("${text}" "there is no component tape, but there are base, io, .*store, .*train")
