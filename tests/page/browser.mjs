// Opens one file in headless Chromium, goes through the steps of the first argument, and prints as JSON what came of it:
// {ms, errors, requests, values}. A step is ["eval", expression], ["click", selector], ["fill", selector, text],
// ["hover", selector, x, y], ["scroll", y], ["key", name], ["reload"], ["wait", expression] or ["shot", path].
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(process.env.STORES + "/");
const load = async (name) => import(pathToFileURL(require.resolve(name)).href);
const chromium = (await load("@sparticuz/chromium")).default;
const { chromium: driver } = (await load("playwright-core")).default ?? (await load("playwright-core"));

const { page: file, steps, width, scheme } = JSON.parse(process.argv[2]);
const unwanted = ["--single-process", "--no-zygote", "--disable-web-security"];
const browser = await driver.launch({
  args: chromium.args.filter((one) => !unwanted.includes(one)), executablePath: await chromium.executablePath(), headless: true,
});
const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme: scheme });
const page = await context.newPage();
const errors = [];
let requests = 0;
page.on("console", (message) => { if (["error", "warning"].includes(message.type())) errors.push(message.text()); });
page.on("pageerror", (error) => errors.push(String(error)));
page.on("request", (one) => { if (!one.url().startsWith("file://" + file)) requests += 1; });
const begun = Date.now();
await page.goto("file://" + file);
await page.waitForSelector("tbody tr");
await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0))));
const ms = Date.now() - begun;
const values = [];
for (const [what, ...rest] of steps) {
  if (what === "eval") values.push(await page.evaluate(rest[0]));
  else if (what === "click") await page.click(rest[0]);
  else if (what === "fill") await page.fill(rest[0], rest[1]);
  else if (what === "hover") await page.hover(rest[0], { position: { x: rest[1], y: rest[2] } });
  else if (what === "scroll") await page.evaluate((y) => scrollTo(0, y), rest[0]);
  else if (what === "key") await page.keyboard.press(rest[0]);
  else if (what === "reload") { await page.reload(); await page.waitForSelector("tbody tr"); }
  else if (what === "wait") await page.waitForFunction(rest[0], null, { timeout: 30000 });
  else if (what === "shot") await page.screenshot({ path: rest[0], fullPage: true });
  else throw new Error("no such step: " + what);
}
await browser.close();
console.log(JSON.stringify({ ms, errors, requests, values }));
