// Products in whole numbers for any machine.
#define EDGE_INTEGER integer_product_portable
#include "integer_unit.h"
