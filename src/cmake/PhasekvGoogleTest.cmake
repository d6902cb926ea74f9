# Provides GTest::gtest_main and GTest::gmock_main: the system's GoogleTest, else a downloaded one.

include(FetchContent)
set(INSTALL_GTEST OFF)
FetchContent_Declare(
    googletest
    URL https://github.com/google/googletest/archive/refs/tags/v1.15.2.tar.gz
    URL_HASH SHA256=7b42b4d6ed48810c5362c265a17faebe90dc2373c885e5216439d37927f02926
    DOWNLOAD_EXTRACT_TIMESTAMP ON
    FIND_PACKAGE_ARGS 1.12 NAMES GTest
)
FetchContent_MakeAvailable(googletest)
include(GoogleTest)
