// In place of the toolkit's header, for the program of tests that runs on a device.
#pragma once

#include "emulated_device.h"
